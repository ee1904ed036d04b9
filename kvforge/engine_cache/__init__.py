"""Engines that are built when a checkpoint is served, once for each content, options and machine."""
