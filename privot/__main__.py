"""``python -m privot``, as torchrun starts it."""

from privot.cli import main

if __name__ == "__main__":
    main()
