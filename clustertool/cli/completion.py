"""This module completes the command lines of clustertool and clusterrun for bash, zsh and fish.

A shell calls `clustertool --complete -- clustertool run --wo` with the arguments up to the cursor, the last one incomplete or
empty; the answer is one candidate a line. Where there is none, the shell completes files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from clustertool.cli.options import FLAG, Opt, Verb
from clustertool.cli.parser import spellings, split

SCRIPTS: Mapping[str, str] = {
    "bash": """\
# Completion for bash. In ~/.bashrc: source <(clustertool --print-completion-script bash)
_clustertool() {
    local found
    COMPREPLY=()
    while IFS= read -r found; do
        COMPREPLY+=("$found")
    done < <(clustertool --complete -- "${COMP_WORDS[@]:0:COMP_CWORD+1}" 2>/dev/null)
}
complete -o default -F _clustertool clustertool clusterrun
""",
    "zsh": """\
# Completion for zsh. In ~/.zshrc, after compinit: source <(clustertool --print-completion-script zsh)
_clustertool() {
    local -a found
    found=("${(@f)$(clustertool --complete -- "${(@)words[1,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$found" ]]; then compadd -a found; else _files; fi
}
compdef _clustertool clustertool clusterrun
""",
    "fish": """\
# Completion for fish. In ~/.config/fish/config.fish: clustertool --print-completion-script fish | source
function __clustertool
    clustertool --complete -- (commandline --tokenize --cut-at-cursor) (commandline --current-token --cut-at-cursor) 2>/dev/null
end
complete --command clustertool --command clusterrun --arguments '(__clustertool)'
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
    """List the completions of the last token: verbs; behind a verb the choices of its arguments; options if it has a dash.

    Options are those in `common`, behind a verb its own ones. Behind an option that takes a value: the values that are known.
    tokens: the program's name and the arguments up to the cursor. help_option: one more option of each verb. values: lists the
    values of options whose value has this name in help (JOB, HOST).
    """
    before, last = _split_typed(tokens)
    verb = next((verb for token in before for verb in verbs if verb.name == token), None)
    known = spellings((*verb.options, help_option) if verb else common)
    others = [verb.name for verb in verbs] if verb is None else verb.positional.choices if verb.positional else ()
    return _matching(before, last, known, values, others)


def launcher_candidates(tokens: Sequence[str], known: Mapping[str, Opt], values: Values = lambda name: ()) -> list[str]:
    """List the completions of the last token for clusterrun: options if it has a dash, or an option's values; else [].

    Behind the script it is [], too. known: every spelling of its options. values: see candidates().
    """
    before, last = _split_typed(tokens)
    left = list(before)
    while left:
        name, value = split(left.pop(0), known)
        option = known.get(name)
        if option is None and not name.startswith("-"):
            return []
        if left and option is not None and option.default is not FLAG and value is None and not option.bare:
            left.pop(0)
    return _matching(before, last, known, values, ())


def _split_typed(tokens: Sequence[str]) -> tuple[list[str], str]:
    """Split tokens into the arguments before the last one, and the last one; leave out the program's name and all "=".

    A last "=" becomes "".
    """
    *before, last = list(tokens[1:]) or [""]
    return [token for token in before if token != "="], "" if last == "=" else last  # bash has = as a token of its own


def _matching(
    before: Sequence[str], last: str, known: Mapping[str, Opt], values: Values, others: Sequence[str]
) -> list[str]:
    """List the completions that begin with the last token.

    They are values if it follows an option that takes one, or has the form --mode=p; else long options if it begins with a
    dash; else `others`.
    """
    name, value = split(last, known)
    if last.startswith("--") and value is not None:  # --mode=p
        option = known.get(name)
        found = [f"{name}={choice}" for choice in _values_of(option, value, values)] if option else []
    elif before and (option := known.get(split(before[-1], known)[0])) and option.default is not FLAG:
        found = _values_of(option, last, values)
    elif last.startswith("-"):
        found = [spelling for spelling in known if spelling.startswith("--")]
    else:
        found = list(others)
    return [each for each in found if each.startswith(last)]


def _values_of(option: Opt, typed: str, values: Values) -> list[str]:
    """List the choices of an option, and the values of its kind; for a list (HOST,...) with the typed items in front."""
    kind, several, _ = option.value.partition(",")
    first = typed.rpartition(",")[0] + "," if several and "," in typed else ""
    return [*option.choices, *(first + value for value in values(kind))]
