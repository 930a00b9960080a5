"""Linear layers made ready for many small steps: the same numbers, no gradient, and everything as it was afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ramet.policies import packed as packed_module
from ramet.policies.packed import PackedLinears, packs, pays


class Net(nn.Module):
    """A large layer with a bias, one without, a small one, and a head tied to an embedding."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.up = nn.Linear(256, 512)
            self.down = nn.Linear(512, 256, bias=False)
            self.small = nn.Linear(256, 4)
            self.table = nn.Embedding(300, 256)
            self.head = nn.Linear(256, 300, bias=False)
        self.head.weight = self.table.weight
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.relu(self.up(x)))
        return torch.cat([self.head(hidden), self.small(hidden)], -1)


def inputs(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(1, rows, 256, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("rows", [1, 5, 16, 40])
@pytest.mark.parametrize(("dtype", "noise"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_packed_is_plain_to_the_noise_of_its_type(rows: int, dtype: torch.dtype, noise: float) -> None:
    """Made for 16 rows, run with any number of them; leading dimensions stay."""
    net, x = Net(dtype), inputs(rows, dtype)
    with torch.no_grad():
        expected = net(x)
        packed = PackedLinears(net, rows=16)
        with packed:
            found = net(x)
    assert len(packed) == 3
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(found, expected, rtol=noise, atol=noise)


def test_under_autocast_it_is_what_autocast_gives() -> None:
    net, x = Net(), inputs(5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = net(x)
        with PackedLinears(net, rows=5, autocast=torch.bfloat16):
            found = net(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_it_is_refused_where_gradients_are_enabled() -> None:
    net = Net()
    packed = PackedLinears(net, rows=4)
    with pytest.raises(RuntimeError, match="no gradient"), packed:
        pass
    with torch.no_grad(), packed, torch.enable_grad(), pytest.raises(RuntimeError, match="no gradient"):
        net(inputs(4))
    net(inputs(4)).sum().backward()  # outside of it the model is as it was
    assert net.up.weight.grad is not None


def test_the_model_is_as_it_was_even_after_an_error() -> None:
    net = Net()
    packed = PackedLinears(net, rows=4)
    with pytest.raises(ZeroDivisionError), torch.no_grad(), packed:
        _ = 1 / 0
    assert not any("forward" in module.__dict__ for module in net.modules())
    with torch.no_grad(), packed:
        assert "forward" in net.up.__dict__
        with pytest.raises(RuntimeError, match="entered while it is entered"), packed:
            pass
    assert not any("forward" in module.__dict__ for module in net.modules())


def test_copies_are_of_the_weights_at_the_time() -> None:
    net, x = Net(), inputs(4)
    with torch.no_grad():
        packed = PackedLinears(net, rows=4)
        before = net(x)
        net.up.weight.mul_(2.0)
        with packed:
            torch.testing.assert_close(net(x), before, rtol=1e-5, atol=1e-5)
        with PackedLinears(net, rows=4):
            torch.testing.assert_close(net(x), net(x))
            found = net(x)
        assert (found - before).abs().max() > 0.1


def test_layers_of_another_kind_run_as_they_are() -> None:
    """A subclass may compute something else; a forward that somebody has put in its place is theirs."""

    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return 2 * super().forward(input)

    net = nn.ModuleList([Doubled(256, 256), nn.Linear(256, 256)])
    net[1].forward = lambda x: -x
    assert len(PackedLinears(net, rows=4)) == 0


def test_where_torch_has_no_such_operators_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_module, "packs", lambda dtype: False)
    net, x = Net(), inputs(3)
    assert len(PackedLinears(net, rows=4)) == 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = net(x)
        cast = PackedLinears(net, rows=4, autocast=torch.bfloat16)  # casting once is still worth it
        with cast:
            found = net(x)
    assert len(cast) == 3
    assert torch.equal(found, expected)


def test_operators_that_are_missing_or_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        _reorder_linear_weight = staticmethod(lambda weight, rows: weight)
        _linear_pointwise = staticmethod(lambda x, weight, *rest: x @ weight.T)  # forgets the bias

    for operators in (object(), Wrong()):
        monkeypatch.setattr(torch.ops, "mkldnn", operators)
        assert not packs.__wrapped__(torch.float32)


def test_float64_is_never_packed() -> None:
    assert not packs(torch.float64)
    assert len(PackedLinears(Net(torch.float64), rows=4)) == 0


def test_packing_pays_from_some_steps_on() -> None:
    f32, b16 = torch.float32, torch.bfloat16
    assert [pays(n, 16, f32, None) for n in (0, 15, 16, 400)] == [False, False, True, True]
    assert [pays(20, rows, f32, None) for rows in (1, 3, 4)] == [False, False, True]
    assert pays(20, 1, b16, None)
    assert [pays(n, 1, f32, b16) for n in (3, 4)] == [False, True]
