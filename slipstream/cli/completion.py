"""`slipstream completion`: print a script that completes commands and options in a shell."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Callable

from slipstream.cli.arguments import Parser
from slipstream.cli.commands import ALIASES, COMMANDS
from slipstream.cli.commands import create_parser as create_command_parser
from slipstream.repository.templates import FIXED_NAMES
from slipstream.weights.sources.known_models import KNOWN_MODELS

_BASH = """\
# completion of slipstream: put this line into ~/.bashrc
#   source <(slipstream completion bash)
_slipstream_models() {{
  local file name
  printf '%s\\n' {models}
  for file in ~/models/*/config.pbtxt; do
    name=$(basename "$(dirname "$file")")
    case $name in
      {helpers}) ;;
      *) if [ -e "$file" ]; then printf '%s\\n' "$name"; fi ;;
    esac
  done
}}
_slipstream() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} words=
  local before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    words={commands}
  elif [ "$before" = -m ] || [ "$before" = --model ]; then
    words=$(_slipstream_models)
  elif [ "${{current:0:1}}" = - ]; then
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
  else
    COMPREPLY=($(compgen -f -- "$current"))
    case $command in
      {naming}) COMPREPLY+=($(compgen -W "$(_slipstream_models)" -- "$current")) ;;
    esac
    return
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o filenames -F _slipstream slipstream
"""
_ZSH = """\
# completion of slipstream: put this line into ~/.zshrc
#   source <(slipstream completion zsh)
autoload -Uz compinit bashcompinit && compinit && bashcompinit
"""
_FISH = """\
# completion of slipstream:
#   slipstream completion fish > ~/.config/fish/completions/slipstream.fish
"""


# commands whose argument is a model
_NAMING = ("start", "serve", "run", "show", "remove", "rm", "pull")


def create_parser() -> Parser:
    parser = Parser(
        "slipstream completion",
        "Print a script that completes commands and options in a shell. "
        "For bash, put `source <(slipstream completion bash)` into ~/.bashrc.",
    )
    parser.add_argument("shell", choices=sorted(_WRITERS), help="Shell that reads the script.")
    return parser


def run(given: Namespace) -> int:
    print(_WRITERS[given.shell](), end="")
    return 0


def _bash() -> str:
    cases = [
        f"      {name}) words={shlex.quote(' '.join(_long_options(name)))} ;;" for name in _names()
    ]
    return _BASH.format(
        commands=shlex.quote(" ".join(_names())),
        cases="\n".join(cases),
        models=" ".join(KNOWN_MODELS),
        helpers="|".join(f"{name}|*-{name}" for name in FIXED_NAMES),
        naming="|".join(_NAMING),
    )


def _zsh() -> str:
    return _ZSH + _bash()


def _fish() -> str:
    lines = [_FISH]
    for name in _names():
        text = COMMANDS[ALIASES.get(name, name)].help
        lines.append(
            f"complete -c slipstream -f -n __fish_use_subcommand -a {name} -d {shlex.quote(text)}\n"
        )
        lines += [
            f"complete -c slipstream -n '__fish_seen_subcommand_from {name}' "
            f"-l {option.removeprefix('--')}\n"
            for option in _long_options(name)
        ]
    return "".join(lines)


def _names() -> list[str]:
    return sorted({*COMMANDS, *ALIASES})


def _long_options(name: str) -> list[str]:
    options = create_command_parser(ALIASES.get(name, name)).long_options().values()
    return sorted({option for option in options if option.startswith("--")} | {"--help"})


_WRITERS: dict[str, Callable[[], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
