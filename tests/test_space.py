"""Search spaces: ladders, what follows, what can be built."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hymell_jax as hj
from hymell_jax import refinement, space, space_points


@pytest.fixture(scope="module")
def dense(llama) -> space.Space:
    return hj.make_space(llama, hj.workload())


def test_default_ladders_are_legal_sizes_around_the_start(dense):
    ladders = {v.name: np.array(v.values) for v in dense.variables}
    assert list(ladders) == ["d_model", "n_layers", "n_kv_heads", "d_ff"]
    assert (ladders["d_model"] % 128 == 0).all()
    assert (ladders["d_model"].min(), ladders["d_model"].max()) == (2048, 8192)
    assert (ladders["d_ff"] % 128 == 0).all()
    assert list(ladders["n_layers"]) == list(range(16, 65))


def test_heads_follow_the_width_so_that_heads_times_width_keeps_its_share(dense):
    index = space_points.random_points(dense, 200, np.random.default_rng(0))
    archs = space_points.concrete_architectures(dense, index)
    np.testing.assert_array_equal(archs.n_heads * archs.head_dim, archs.d_model)
    np.testing.assert_array_equal(archs.n_heads % archs.n_kv_heads, 0)
    for i in range(0, 200, 50):
        fields = {f: float(getattr(archs, f)[i]) for f in archs.__dataclass_fields__}
        hj.architecture(**fields)  # the factory takes every point


def test_head_width_follows_where_heads_move(llama):
    found = hj.make_space(llama, hj.workload(), free=["heads"], levels={"heads": [16, 32, 64, 24]})
    index = np.arange(len(found.variables[0].values))[:, None]
    archs = space_points.concrete_architectures(found, index[space_points.is_legal(found, index)])
    assert list(zip(archs.n_heads, archs.head_dim, strict=True)) == [(16, 256), (32, 128), (64, 64)]
    np.testing.assert_array_equal(archs.value_head_dim, archs.head_dim)


def test_untied_heads_and_widths_move_apart(llama):
    found = hj.make_space(llama, hj.workload(), free=["n_heads", "head_dim"])
    assert found.rules.tie is None


def test_widths_and_heads_divide_among_gpus(llama):
    found = hj.make_space(
        llama, hj.workload(tensor_parallel=8), free=["n_heads", "d_ff", "n_kv_heads", "head_dim"]
    )
    archs = space_points.concrete_architectures(
        found, space_points.random_points(found, 100, np.random.default_rng(1))
    )
    assert (archs.n_heads % 8 == 0).all()
    assert (archs.d_ff % 8 == 0).all()
    assert ((archs.n_kv_heads % 8 == 0) | (8 % archs.n_kv_heads == 0)).all()


def test_relaxed_corners_are_the_ends_of_the_ladders(dense):
    for x, end in ((0.0, 0), (1.0, -1)):
        arch = space_points.relaxed_architecture(dense.box, jnp.full(4, x))
        for v in dense.variables:
            assert float(getattr(arch, v.name)) == pytest.approx(v.values[end], rel=1e-5)
        assert float(arch.n_heads) == pytest.approx(float(arch.d_model) / 128, rel=1e-5)


def test_relaxed_coordinates_round_back_to_their_rungs(dense):
    index = space_points.random_points(dense, 100, np.random.default_rng(2))
    x = space_points.coordinates(dense, space_points.values_at(dense, index))
    np.testing.assert_array_equal(space_points.nearest_index(dense, x), index)


def test_relaxed_sizes_have_finite_slopes(dense):
    slope = jax.jacrev(lambda x: space_points.relaxed_architecture(dense.box, x).n_heads)(
        jnp.full(4, 0.5)
    )
    assert float(slope[0]) > 0
    assert np.isfinite(slope).all()


def test_what_cannot_be_built_is_moved_to_what_can(dense):
    lengths = [len(v.values) for v in dense.variables]
    every = np.random.default_rng(3).integers(0, lengths, (300, 4))
    assert not space_points.is_legal(dense, every).all()
    moved = space_points.repaired(dense, every)
    assert space_points.is_legal(dense, moved).all()
    assert len(moved) > 250
    assert ((moved[:, None] != every[None]).sum(-1).min(1) <= 1).all()  # one variable moved


def test_all_points_are_those_that_can_be_built_each_once(llama):
    found = hj.make_space(
        llama, hj.workload(), levels={"d_model": [2048, 4096], "kv_heads": [4, 8, 32]},
        free=["d_model", "n_kv_heads"],
    )  # fmt: skip
    points = np.concatenate(list(space_points.all_points(found)))
    heads = {2048: 16, 4096: 32}
    expected = {(d, kv) for d in heads for kv in (4, 8, 32) if heads[d] % kv == 0}
    assert {tuple(v) for v in space_points.values_at(found, points)} == expected
    assert len(points) == len(expected) == 5


def test_shares_of_layers_become_whole_layers():
    arch = hj.preset("deepseek-v2-lite").architecture  # one dense layer of 27
    found = hj.make_space(arch, hj.workload(), free=["n_layers"])
    index = np.arange(len(found.variables[0].values))[:, None]
    archs = space_points.concrete_architectures(found, index)
    mixture = archs.moe_fraction * archs.n_layers
    np.testing.assert_allclose(mixture, np.round(mixture), atol=1e-4)


def test_a_space_file_says_what_is_free(llama):
    content = {
        "base": "llama-3.1-8b",
        "free": {"layers": {"range": [16, 32]}, "d_ff": {"range": [8192, 16384], "multiple": 256}},
    }
    found = space.space_from_json(content, llama, hj.workload())
    assert found.names == ("n_layers", "d_ff")
    assert found.size == 17 * 33


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(free=["width"]), "cannot be free"),
        (dict(free=["n_experts"]), "is 0 in the base"),
        (dict(free=["d_model"], fix=["d_model"]), "Nothing is free"),
        (dict(ranges={"d_model": (100, 120)}), "no multiple of 128"),
        (dict(ranges={"d_ff": (1, 1e8)}), "narrow its range"),
        (dict(levels={"d_model": []}), "must be a list"),
        (dict(levels={"d_model": [100.5]}), "whole numbers"),
        (dict(tie="d_ff"), "tie must be"),
    ],
)
def test_bad_spaces_are_refused(llama, given, said):
    with pytest.raises(ValueError, match=said):
        hj.make_space(llama, hj.workload(), **given)


def test_bad_space_files_are_refused(llama):
    for content, said in (
        ({"base": "x", "free": {}}, "needs `free`"),
        ({"free": {"d_model": 3}}, "must be an object"),
        ({"free": {"d_model": {}}, "frees": 1}, "holds base, free, tie"),
    ):
        with pytest.raises(ValueError, match=said):
            space.space_from_json(content, llama, hj.workload())
    latent = hj.preset("deepseek-v2-lite").architecture
    with pytest.raises(ValueError, match="no KV heads"):
        hj.make_space(latent, hj.workload(), free=["n_kv_heads"])


def test_a_space_without_points_says_so(llama):
    found = hj.make_space(llama, hj.workload(), free=["n_kv_heads"], levels={"n_kv_heads": [5, 7]})
    with pytest.raises(ValueError, match="Next to none"):
        space_points.random_points(found, 10, np.random.default_rng(0))


def test_triple_moves_change_three_variables_and_samples_can_be_built(dense):
    members = refinement.sampled(dense, 300)
    assert len(members) > 10 and space_points.is_legal(dense, members).all()
    moved = refinement._triples(dense, members[:1])
    assert len(moved) and space_points.is_legal(dense, moved).all()
    assert ((moved != members[0]).sum(1) == 3).all()
    assert (np.abs(moved - members[0]).max(1) <= 4).all()
