"""This module completes the command line for bash, zsh and fish.

A shell calls `clustertool --complete -- clustertool run --wo` with the arguments up to the cursor, the last one incomplete or
empty; the answer is one candidate a line. Where there is none, the shell completes files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from clustertool.cli.options import FLAG, Opt, Verb
from clustertool.cli.parser import spellings, split

SCRIPTS: Mapping[str, str] = {
    "bash": """\
# Completion of clustertool for bash. In ~/.bashrc: source <(clustertool --print-completion-script bash)
_clustertool() {
    local found
    COMPREPLY=()
    while IFS= read -r found; do
        COMPREPLY+=("$found")
    done < <(clustertool --complete -- "${COMP_WORDS[@]:0:COMP_CWORD+1}" 2>/dev/null)
}
complete -o default -F _clustertool clustertool
""",
    "zsh": """\
# Completion of clustertool for zsh. In ~/.zshrc, after compinit: source <(clustertool --print-completion-script zsh)
_clustertool() {
    local -a found
    found=("${(@f)$(clustertool --complete -- "${(@)words[1,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$found" ]]; then compadd -a found; else _files; fi
}
compdef _clustertool clustertool
""",
    "fish": """\
# Completion of clustertool for fish. In ~/.config/fish/config.fish: clustertool --print-completion-script fish | source
function __clustertool
    clustertool --complete -- (commandline --tokenize --cut-at-cursor) (commandline --current-token --cut-at-cursor) 2>/dev/null
end
complete --command clustertool --arguments '(__clustertool)'
""",
}


Values = Callable[[str], Sequence[str]]


def candidates(
    tokens: Sequence[str],
    verbs: Sequence[Verb],
    common: Sequence[Opt],
    help_option: Opt,
    values: Values = lambda name: (),
) -> list[str]:
    """What the last token may become. `tokens`: the program's name and the arguments up to the cursor.

    values: of options whose value help calls so (JOB, HOST).
    """
    *before, last = list(tokens[1:]) or [""]
    before = [token for token in before if token != "="]  # bash has it as a token of its own
    last = "" if last == "=" else last
    verb = next((verb for token in before for verb in verbs if verb.name == token), None)
    known = spellings((*verb.options, help_option) if verb else common)
    name, value = split(last, known)
    if last.startswith("--") and value is not None:  # --mode=p
        option = known.get(name)
        found = [f"{name}={choice}" for choice in _values_of(option, value, values)] if option else []
    elif before and (option := known.get(split(before[-1], known)[0])) and option.default is not FLAG:
        found = _values_of(option, last, values)
    elif last.startswith("-"):
        found = [spelling for spelling in known if spelling.startswith("--")]
    elif verb is None:
        found = [verb.name for verb in verbs]
    else:
        found = list(verb.positional.choices) if verb.positional else []
    return [each for each in found if each.startswith(last)]


def _values_of(option: Opt, typed: str, values: Values) -> list[str]:
    """What an option's value may be. Of a list (HOST,...) the last item is completed."""
    kind, several, _ = option.value.partition(",")
    first = typed.rpartition(",")[0] + "," if several and "," in typed else ""
    return [*option.choices, *(first + value for value in values(kind))]
