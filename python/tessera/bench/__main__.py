"""See `tessera.bench`."""

from .compare import main

if __name__ == "__main__":
    main()
