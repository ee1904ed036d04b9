"""What only some KV policies have: each file is a capability, which ``KVPolicy`` names and any policy may implement."""
