"""The page that the gateway serves at `/`: chat, completion, and the server's numbers live. No build step."""
