"""TensorRT in two flavours: TensorRT 11, and TensorRT for RTX, which builds plans on a machine without a GPU.

What differs between them is ``tensorrt11`` and ``rtx``; ``installed`` says which one is used. The compiler and the
runtime take ``trt`` from ``api`` and ask the flavour.
"""
