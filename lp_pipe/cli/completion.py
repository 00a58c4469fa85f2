"""`lp_pipe completion`: print a script that lets a shell complete commands, options, runs and nodes.

The script is static, written by shtab. Runs and nodes are found by a few lines of shell, which read the files of live
runs: to start Python for each press of the Tab key would take a second on a busy machine.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import shtab

from lp_pipe.cli.errors import DONE
from lp_pipe.cli.main import COMMANDS, make_parser

SHELLS = ("bash", "zsh", "fish")
EPILOG = """\
examples:
  lp_pipe completion bash > ~/.local/share/bash-completion/completions/lp_pipe
  lp_pipe completion zsh  > ~/.zfunc/_lp_pipe               with fpath+=~/.zfunc before compinit in ~/.zshrc
  lp_pipe completion fish > ~/.config/fish/completions/lp_pipe.fish
"""

HELP = "print a script with which a shell completes commands, options, runs and nodes"
DESCRIPTION = "Print a completion script for a shell. It is used from the next start of the shell on."
USAGE = "lp_pipe completion bash|zsh|fish"

_FUNCTIONS = r"""
__lp_pipe_live() {  # the run.json-like files of live runs
  for file in "${XDG_STATE_HOME:-$HOME/.local/state}"/lp_pipe/live/*.json; do
    [ -f "$file" ] && kill -0 "$(sed -n 's/^ "pid": \([0-9]*\),$/\1/p' "$file")" 2>/dev/null && printf '%s\n' "$file"
  done
}
__lp_pipe_folders() {
  __lp_pipe_live | while IFS= read -r file; do sed -n 's/^ "run_dir": "\(.*\)",$/\1/p' "$file"; done
  for folder in runs/*; do [ -f "$folder/run.json" ] && printf '%s\n' "$folder"; done
}
__lp_pipe_run_names() { __lp_pipe_folders | sed 's|.*/||' | sort -u; }
__lp_pipe_node_names() {  # of the runs whose names are among the arguments; without any, of all live runs
  __lp_pipe_folders | while IFS= read -r folder; do
    case " $* " in
      *" ${folder##*/} "* | *" $folder "*) ;;
      *) [ $# -gt 0 ] && continue ;;
    esac
    sed -n 's/^      "name": "\(.*\)",\{0,1\}$/\1/p' "$folder/graph.json" 2>/dev/null
  done | sort -u
}
"""
_BASH = r"""
_lp_pipe_runs() {
  case "$1" in
    */* | .*) compgen -d -- "$1" ;;
    *) compgen -W "$(__lp_pipe_run_names)" -- "$1" ;;
  esac
}
_lp_pipe_nodes() { compgen -W "$(__lp_pipe_node_names "${COMP_WORDS[@]:2:1}")" -- "$1"; }
_lp_pipe_runs_or_nodes() { _lp_pipe_runs "$1"; compgen -W "$(__lp_pipe_node_names)" -- "$1"; }
"""
_ZSH = r"""
_lp_pipe_runs() {
  emulate -L zsh
  if [[ $PREFIX == */* ]]; then _files -/; else compadd -- ${(f)"$(emulate sh; __lp_pipe_run_names)"}; fi
}
_lp_pipe_nodes() { emulate -L zsh; compadd -- ${(f)"$(emulate sh; __lp_pipe_node_names)"} }
_lp_pipe_runs_or_nodes() { _lp_pipe_runs; _lp_pipe_nodes }
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's argument."""
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Print the script."""
    print(script_for(arguments.shell))
    return DONE


def script_for(shell: str) -> str:
    """Return the completion script for a shell."""
    parser, _ = make_parser(COMMANDS)
    for command in _parsers_of(parser):
        for action in command._actions:
            _complete(action)
    return str(shtab.complete(parser, shell))


def _parsers_of(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the parser, and those of its commands and of their actions."""
    found = [parser]
    for action in parser._actions:
        if isinstance(action.choices, Mapping):  # of commands
            for inner in action.choices.values():
                found += _parsers_of(inner)
    return found


def _complete(action: Any) -> None:
    """Say what completes the value of an option or argument, by the name that its help gives the value."""
    name = str(action.metavar or "").strip("[]…")
    if name in ("RUN", "RUN|FOLDER"):
        action.complete = _by_functions("_lp_pipe_runs")
    elif name == "NODE":
        action.complete = _by_functions("_lp_pipe_nodes")
    elif "RUN" in name and "NODE" in name:
        action.complete = _by_functions("_lp_pipe_runs_or_nodes")
    elif name in ("DIR", "FOLDER"):
        action.complete = shtab.DIRECTORY
    elif name in ("TARGET", "PATH", "PROFILE", "TOPOLOGY") or name.startswith("FILE"):
        action.complete = shtab.FILE


def _by_functions(name: str) -> dict[str, Any]:
    fish_names = {
        "_lp_pipe_runs": "__lp_pipe_run_names",
        "_lp_pipe_nodes": "__lp_pipe_node_names",
        "_lp_pipe_runs_or_nodes": "__lp_pipe_run_names; __lp_pipe_node_names",
    }
    return {
        "bash": name,
        "zsh": name,
        "fish": f"({name})",
        "preamble": {
            "bash": _FUNCTIONS + _BASH,
            "zsh": _FUNCTIONS + _ZSH,
            "fish": "\n".join(_fish_function(one, body) for one, body in fish_names.items()),
        },
    }


def _fish_function(name: str, body: str) -> str:
    """Return a function that lets sh do the work. In single quotes fish knows two escapes."""
    script = f"{_FUNCTIONS}\n{body}".replace("\\", "\\\\").replace("'", "\\'")
    return f"function {name}\n  sh -c '{script}'\nend"
