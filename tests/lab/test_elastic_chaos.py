"""An elastic job goes on, or ends everywhere, whatever happens to its nodes; its epochs never overlap.

Each seed is one story: a job on 4 or 5 nodes, and one to three faults at random moments. They run with `make test-chaos`;
tests/node/test_epochs.py has single faults. A failing seed is repeated with
`pytest tests/lab/test_elastic_chaos.py -m "chaos or not chaos" -k "story[17]"`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli import LabSite
from tests.lab.elastic_story import ElasticStory, etcd_or_skip
from tests.lab.lab_store import LabStore

STORIES = 50
STORE_EACH = 3  # of so many stories one has a store


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(STORIES))
def test_story(site: Callable[..., LabSite], tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    stored = seed % STORE_EACH == STORE_EACH - 1
    if stored:
        etcd_or_skip()
    many = site(dice.choice((4, 5)))
    store = LabStore(many.lab, tmp_path / "etcd") if stored else None
    story = ElasticStory(many, dice, store)
    try:
        story.start(dice.choice(("next", "restart")), many.count - (many.count > 4))
        for _ in range(dice.randint(1, 3)):
            time.sleep(dice.uniform(0.0, 2.0))
            if story.ended:
                break
            faults = story.faults()
            faults[dice.choice(sorted(faults))]()
        if not (story.ended or stored) and seed % 7 == 3:
            story.lose_coordinator()
        elif not story.ended and seed % 8 == 5:
            story.stop()
        done = story.end()
        story.check(done)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}\n{story.described()}") from None
    finally:
        if store:
            store.kill()
    print(f"seed {seed}: {'; '.join(story.notes)}")
