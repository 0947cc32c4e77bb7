"""`python -m mla_codegen`."""

from mla_codegen.cli.main import main

if __name__ == "__main__":
    main()
