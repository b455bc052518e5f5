"""What travels between a console and an agent: types, codec, frames and JSON-RPC. Nothing here does I/O."""
