"""The bundled suite: both fixes, and what they replaced, on this machine's device."""
