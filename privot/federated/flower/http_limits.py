"""Paths, headers and limits of the HTTP calls between Flower's processes."""

SECRET_HEADER = "x-privot-secret"
FLEET_PATH = "/v1/fleet/"
PUSH_MESSAGES_PATH = f"{FLEET_PATH}push-messages"
PUSH_OBJECT_PATH = f"{FLEET_PATH}push-object"
PULL_OBJECT_PATH = f"{FLEET_PATH}pull-object"
# Bytes of a call, or of a response, that carries no part of a message; also the bytes that Flower
# adds to a part of a message.
REQUEST_OVERHEAD_BYTES = 1 << 14
RESPONSE_OVERHEAD_BYTES = 1 << 18
# Parts of an honest message or reply: Flower's message, its content, and the record in it.
MAX_MESSAGE_OBJECTS = 3
