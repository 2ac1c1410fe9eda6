"""Start one real engine by the flags of its command line, let it register, and stop it: `python -m tests.engine.start FLAGS…`."""

import sys


def main(flags: list[str]) -> None:
    """The engine is up once its caches are registered."""
    from vllm import LLMEngine
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
    LLMEngine.from_engine_args(EngineArgs.from_cli_args(parsed))


if __name__ == "__main__":
    main(sys.argv[1:])
