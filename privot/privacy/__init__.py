"""The gate and everything else that the guarantee rests on: small, reviewed, fully tested."""
