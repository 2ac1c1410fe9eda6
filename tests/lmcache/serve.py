"""vLLM's `serve`: `python -m tests.lmcache.serve serve MODEL …` is `vllm serve MODEL …`.

Put together here because vLLM's own command line asks for a distribution named vllm, which the CPU build is not.
"""


def main() -> None:
    """Parse the command line and serve until ended."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    serve = ServeSubcommand()
    parser = FlexibleArgumentParser()
    serve.subparser_init(parser.add_subparsers(dest="subparser"))
    arguments = parser.parse_args()
    serve.validate(arguments)
    serve.cmd(arguments)


if __name__ == "__main__":
    main()
