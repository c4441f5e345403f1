"""Define what nodes and the laptop exchange: frames, payloads, and the checks of answers."""
