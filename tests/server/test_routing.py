"""The choice of a replica: block hashes, what each replica was sent, and the load."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine import blocks
from slipstream.server.engine_link.routing import (
    Router,
    Thresholds,
    block_hashes,
    load,
    root_hash,
)

TOKENS = st.lists(st.integers(0, 5), max_size=40)
CHAINS = st.lists(st.integers(0, 30), unique=True, max_size=12)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_prompts_share_the_hashes_of_the_blocks_that_both_begin_with(first, second, size):
    root = root_hash(0, "")
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    pairs = zip(block_hashes(first, size, root), block_hashes(second, size, root), strict=False)
    equal = [one == other for one, other in pairs]
    assert equal == [index < common // size for index in range(len(equal))]


@given(TOKENS, st.integers(1, 5), st.integers(0, 8))
def test_a_chain_continues_from_any_block(tokens, size, cut):
    root = root_hash(3, "tenant")
    whole = block_hashes(tokens, size, root)
    assert len(whole) == len(tokens) // size
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else root
    assert whole[cut:] == block_hashes(tokens[cut * size :], size, parent)


@given(
    st.lists(st.tuples(TOKENS, st.integers(0, 2), st.sampled_from(["", "a", "b"])), max_size=6),
    st.integers(1, 4),
)
def test_two_prompts_have_equal_hashes_where_the_engine_has_equal_ones(prompts, size):
    routed = Counter()
    engine = Counter()
    for tokens, adapter, salt in prompts:
        routed.update(block_hashes(tokens, size, root_hash(adapter, salt)))
        parent = blocks.root_hash(adapter, salt)
        for start in range(0, len(tokens) - size + 1, size):
            parent = blocks.hash_block(parent, tokens[start : start + size])
            engine[parent] += 1
    assert sorted(routed.values()) == sorted(engine.values())


def test_adapters_and_salts_are_at_the_root():
    roots = {root_hash(adapter, salt) for adapter in (0, 1, 10) for salt in ("", "0", "a", "a\0b")}
    assert len(roots) == 12
    assert block_hashes([1, 2], 2, root_hash(0, "")) != block_hashes([1, 2], 2, root_hash(0, "a"))


@given(st.lists(st.tuples(st.integers(0, 2), CHAINS)), CHAINS)
def test_matched_counts_the_leading_blocks_that_were_sent(sent, chain):
    router = Router(3, most_blocks=1000)
    known: list[set[int]] = [set(), set(), set()]
    for replica, blocks_sent in sent:
        router.sent(replica, blocks_sent)
        known[replica].update(blocks_sent)
    for replica, count in enumerate(router.matched(chain)):
        assert set(chain[:count]) <= known[replica]
        assert count == len(chain) or chain[count] not in known[replica]


@given(st.lists(st.tuples(st.integers(0, 2), CHAINS)), st.integers(0, 20))
def test_the_least_recently_sent_blocks_are_forgotten_first(sent, most):
    router = Router(3, most)
    recent: list[int] = []
    for replica, chain in sent:
        router.sent(replica, chain)
        assert len(router) <= most
        recent = [*[block for block in recent if block not in chain], *reversed(chain)]
        recent = recent[len(recent) - min(most, len(recent)) :]
    for block in range(31):
        assert any(router.matched([block])) == (block in recent)


def test_a_prompts_end_is_forgotten_before_its_beginning():
    router = Router(2, most_blocks=4)
    router.sent(0, [1, 2, 3])
    router.sent(1, [7, 8])
    assert router.matched([1, 2, 3]) == [2, 0]
    assert router.matched([7, 8]) == [0, 2]


def test_a_restarted_replica_is_forgotten_and_the_others_are_not():
    router = Router(2, most_blocks=10)
    router.sent(0, [1, 2, 3])
    router.sent(1, [1, 2])
    router.forget(0)
    assert router.matched([1, 2, 3]) == [0, 2]
    assert len(router) == 2


def test_blocks_that_a_replica_evicted_are_not_matched():
    router = Router(2, most_blocks=10)
    router.sent(0, [1, 2, 3])
    router.sent(1, [1, 2, 3])
    router.gone(0, [2, 99])
    assert router.matched([1, 2, 3]) == [1, 3]
    router.gone(1, [2])
    assert router.matched([1, 2, 3]) == [1, 1]


def test_a_replica_that_has_half_of_the_prompt_gets_it_though_it_is_busier():
    router = Router(2, most_blocks=100)
    router.sent(1, [1, 2])
    assert router.choose([1, 2, 3, 4], [0.0, 32.0], [0, 1]) == 1
    assert router.choose([1, 2, 3, 4, 5], [0.0, 1.0], [0, 1]) == 0  # less than half
    assert router.choose([9], [3.0, 2.0], [0, 1]) == 1
    assert router.choose([], [2.0, 3.0], [0, 1]) == 0


def test_a_replica_that_is_much_busier_gets_no_request_for_its_cache():
    router = Router(2, most_blocks=100)
    router.sent(0, [1, 2])
    assert router.choose([1, 2], [33.0, 0.0], [0, 1]) == 1
    assert router.choose([1, 2], [1033.0, 1000.0], [0, 1]) == 0  # 33 more, but less than 1.1 times
    assert router.choose([1, 2], [1133.0, 1000.0], [0, 1]) == 1


def test_of_equal_matches_the_least_loaded_is_chosen():
    router = Router(3, most_blocks=100)
    router.sent(0, [1, 2])
    router.sent(2, [1, 2])
    assert router.choose([1, 2], [5.0, 0.0, 4.0], [0, 1, 2]) == 2
    assert router.choose([1, 2], [5.0, 0.0, 4.0], [0, 1]) == 0
    assert router.choose([1, 2], [5.0, 0.0, 4.0], [1]) == 1


@given(
    st.lists(st.tuples(st.integers(0, 3), CHAINS), max_size=8),
    CHAINS,
    st.lists(st.floats(0, 2000), min_size=4, max_size=4),
    st.sets(st.integers(0, 3), min_size=1),
    st.sampled_from(["prefix", "load", "random"]),
)
def test_the_choice_follows_the_rule(sent, chain, loads, among, policy):
    router = Router(4, 1000, policy, seed=1)
    router.block_load = 1e9  # a shared beginning is never worth computing again
    for replica, blocks_sent in sent:
        router.sent(replica, blocks_sent)
    chosen = router.choose(chain, loads, sorted(among))
    assert chosen in among
    limits = Thresholds()
    least = min(loads[replica] for replica in among)
    most = max(loads[replica] for replica in among)
    if policy == "random":
        return
    matched = router.matched(chain)
    best = max(matched[replica] for replica in among)
    unbalanced = most - least > limits.load_difference and most > limits.load_ratio * least
    if policy == "load" or unbalanced or best < limits.matched_share * len(chain) or not chain:
        assert loads[chosen] == least
    else:
        assert matched[chosen] == best


def test_a_beginning_that_prompts_share_spreads_to_less_loaded_replicas():
    router = Router(2, most_blocks=100)
    router.block_load = 0.5
    system = [1, 2]
    router.sent(0, [*system, 10])
    assert router.choose([*system, 11], [9.0, 0.0], [0, 1]) == 0  # a conversation may go on
    router.sent(0, [*system, 11])
    assert router.choose([*system, 12], [0.0, 0.0], [0, 1]) == 0
    assert router.choose([*system, 12], [1.0, 0.0], [0, 1]) == 0  # two blocks are as much work
    assert router.choose([*system, 12], [1.5, 0.0], [0, 1]) == 1
    router.sent(1, [*system, 12])
    assert router.choose([*system, 13], [0.0, 0.5], [0, 1]) == 0
    assert router.choose([*system, 13], [1.0, 0.5], [0, 1]) == 1
    # what belongs to one conversation stays
    assert router.choose([*system, 10, 20], [9.0, 0.0], [0, 1]) == 0


def test_a_repeated_prompt_does_not_make_its_beginning_a_shared_one():
    router = Router(2, most_blocks=100)
    for _ in range(5):
        router.sent(0, [1, 2, 3])
    assert router.choose([1, 2, 3], [9.0, 0.0], [0, 1]) == 0


@pytest.mark.parametrize("policy", ["load", "random"])
def test_other_policies_remember_nothing(policy):
    router = Router(2, 100, policy)
    router.sent(0, [1, 2, 3])
    assert len(router) == 0


def test_the_load_counts_requests_and_the_steps_of_their_prompts():
    assert load(3, 0, 512) == 3
    assert load(3, 1024, 512) == 5
    assert load(0, 10, 0) == 10
