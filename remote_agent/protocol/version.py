"""The numbers both ends must agree on before anything else; imports nothing, so that the bridge starts quickly."""

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
FRAME_LIMIT_BYTES = 1 << 20
