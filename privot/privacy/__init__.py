"""The gate, and all that may touch sensitive data: small, reviewed twice, fully covered."""
