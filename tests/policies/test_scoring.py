"""A causal model that judges responses: the same numbers in every layout, and the reference of a KL reward."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.nn.functional import kl_div

from ramet import ragged
from ramet.envs.llm import LLMEnv
from ramet.errors import ModelError
from ramet.policies.policy import Actor
from ramet.policies.scoring import TransformersScorer
from ramet.policies.transformers import TransformersPolicy
from ramet.ragged import Ragged
from ramet.transforms import Compose, KLRewardTransform
from ramet.types import Sampling

PROMPTS = [[1, 5, 7], [4], [6, 8, 9, 3, 2]]
ANSWERS = [[10, 2], [11, 12, 13, 2], []]


def one_by_one(model, prompts=PROMPTS, answers=ANSWERS, temperature=1.0):
    """A forward pass for each row alone, and a log-softmax."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0] / temperature
        places = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
        rows = [logits[place].log_softmax(-1)[token] for place, token in zip(places, answer, strict=True)]
        found.append(torch.stack(rows) if rows else logits.new_zeros(0))
    return found


def tensors(rows):
    return [torch.tensor(row, dtype=torch.int64) for row in rows]


def in_layout(layout):
    prompts, answers = Ragged.from_rows(tensors(PROMPTS)), Ragged.from_rows(tensors(ANSWERS))
    if layout == "lazy":
        pairs = zip(tensors(PROMPTS), tensors(ANSWERS), strict=True)
        return lazy_stack([TensorDict({"tokens": p, "tokens_response": a}, []) for p, a in pairs], 0)
    if layout == "jagged":
        return TensorDict({"tokens": prompts.jagged(), "tokens_response": answers.jagged()}, [3])
    tokens, mask = prompts.padded("left", 2)
    td = TensorDict({"tokens": tokens, "attention_mask": mask, "tokens_response": answers.jagged()}, [3])
    if layout == "padded":
        return td
    td["tokens_response"], td["response_mask"] = answers.padded("left" if layout == "padded left" else "right", 2)
    return td


@pytest.mark.parametrize("layout", ["jagged", "lazy", "padded", "padded left", "padded right"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_tokens", [None, 6])
def test_each_row_has_the_log_probs_that_it_has_alone(exact_model, layout, temperature, max_tokens):
    """Whatever it is padded with, and however many rows are in a pass."""
    mask_key = "response_mask" if " " in layout else None
    scorer = TransformersScorer(exact_model, temperature=temperature, max_tokens=max_tokens, mask_key=mask_key)
    td = in_layout(layout)
    found = scorer(td)
    expected = one_by_one(exact_model, temperature=temperature)
    if mask_key:
        assert found["log_probs"].shape == td["tokens_response"].shape
        assert not found["log_probs"][~td["response_mask"]].any()
    rows = ragged.rows(found, "log_probs", mask=mask_key)
    assert [len(row) for row in rows] == [2, 4, 0]
    for row, other in zip(rows, expected, strict=True):
        torch.testing.assert_close(row.detach(), other)


def test_dense_responses_give_dense_log_probs(exact_model):
    """Without a batch, with one, and with time in it."""
    scorer = TransformersScorer(exact_model)
    answers = [[10, 2], [11, 2]]
    expected = torch.stack(one_by_one(exact_model, [[1, 5], [4, 6]], answers))
    td = TensorDict({"tokens": torch.tensor([[1, 5], [4, 6]]), "tokens_response": torch.tensor(answers)}, [2])
    torch.testing.assert_close(scorer.log_prob(td).detach(), expected)
    torch.testing.assert_close(scorer.log_prob(td[0]).detach(), expected[0])
    timed = torch.stack([td, td.flip(0) if hasattr(td, "flip") else td[[1, 0]]], 1)
    found = scorer.log_prob(timed).detach()
    assert found.shape == (2, 2, 2)
    torch.testing.assert_close(found[:, 0], expected)
    torch.testing.assert_close(found[:, 1], expected.flip(0))


def test_responses_of_no_tokens(exact_model):
    """There is nothing to say of them, even after no prompt."""
    scorer = TransformersScorer(exact_model)
    nothing = Ragged.from_rows(tensors([[], []])).jagged()
    td = TensorDict({"tokens": Ragged.from_rows(tensors([[1], []])).jagged(), "tokens_response": nothing}, [2])
    assert [len(row) for row in scorer.log_prob(td).unbind()] == [0, 0]
    td = TensorDict({"tokens": torch.ones(2, 3).long(), "tokens_response": torch.zeros(2, 0).long()}, [2])
    assert scorer.log_prob(td).shape == (2, 0)


def test_keys_can_be_named_and_are_told(exact_model):
    """Nested ones too; the mask is beside the tokens."""
    scorer = TransformersScorer(
        exact_model, token_key=("a", "ids"), action_key=("a", "said"), log_prob_key=("a", "lp"), mask_key=("a", "real")
    )
    assert (scorer.attention_key, scorer.mask_key) == (("a", "attention_mask"), ("a", "real"))
    assert scorer.in_keys == [("a", "ids"), ("a", "said")]
    assert (scorer.out_keys, scorer.log_prob_key, scorer.action_key) == ([("a", "lp")], ("a", "lp"), ("a", "said"))
    plain = in_layout("padded right")
    names = {"tokens": "ids", "attention_mask": "attention_mask", "tokens_response": "said", "response_mask": "real"}
    td = TensorDict({"a": {new: plain[old] for old, new in names.items()}}, [3])
    found = scorer(td)["a", "lp"][td["a", "real"]]
    torch.testing.assert_close(found.detach(), torch.cat(one_by_one(exact_model)))


def test_it_is_a_module(tiny):
    """Moved by `.to()`, in the state_dict, with gradients where they are wanted."""
    model = tiny("absolute", torch.float32)
    scorer = TransformersScorer(model)
    assert all(name.startswith("model.") for name in scorer.state_dict())
    td = in_layout("jagged")
    scorer.log_prob(td).values().sum().backward()
    assert model.transformer.wte.weight.grad.abs().sum() > 0
    assert scorer.to(torch.float64).log_prob(td).dtype is torch.float64
    other = TransformersScorer(tiny("absolute", torch.float64, seed=1))
    other.load_state_dict(scorer.state_dict())
    assert torch.equal(other.log_prob(td).values(), scorer.log_prob(td).values())


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda model: TransformersScorer(model, temperature=0.0), ValueError, "temperature must be positive.*0.0"),
        (lambda model: TransformersScorer(model, max_tokens=0), ValueError, "max_tokens must be at least 1: found 0"),
        (lambda model: TransformersScorer(model).log_prob(TensorDict({"tokens": torch.ones(1, 2).long()}, [1])),
         KeyError, "tokens_response"),
        (lambda model: TransformersScorer(model).log_prob(TensorDict({"tokens_response": torch.ones(1, 2)}, [1])),
         KeyError, "tokens"),
        (lambda model: TransformersScorer(model).log_prob(TensorDict({
            "tokens": torch.ones(2, 0).long(), "tokens_response": torch.ones(2, 1).long()}, [2])),
         ModelError, "row 0 has no tokens before its response"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong(exact_model, act, error, message):
    """Which row, and which key."""
    with pytest.raises(error, match=message):
        act(exact_model)


def test_a_model_in_training_mode_is_refused(tiny):
    """Dropout would make the log-probs those of no model; a frozen copy is switched by itself."""
    model = tiny("absolute", torch.float32).train()
    with pytest.raises(ModelError, match="training mode"):
        TransformersScorer(model).log_prob(in_layout("jagged"))
    kl_reward = KLRewardTransform(TransformersScorer(model), action_key="tokens_response")
    td = TransformersScorer(copy.deepcopy(model).eval())(in_layout("jagged")).detach()
    assert not kl_reward(td)["reward"].values().any()


# As the reference of a KL reward.


def perturbed(model, by=0.2):
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter))
    return other


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_policy_that_is_its_reference_pays_exactly_nothing(model, temperature):
    """Bit for bit, whatever the temperature is."""
    scorer = TransformersScorer(model, temperature=temperature)
    kl_reward = KLRewardTransform(scorer, action_key="tokens_response", out_keys=["r"])
    for layout in ("jagged", "lazy", "padded"):
        td = kl_reward(scorer(in_layout(layout)).detach())
        rows = ragged.rows(td, "r")
        assert [len(row) for row in rows] == [2, 4, 0]
        assert not torch.cat(rows).any()


def test_the_expected_penalty_is_the_enumerated_exact_kl(exact_model):
    """Over all 900 responses of two tokens, against the KL of the models' own distributions."""
    reference, prompt, vocabulary = perturbed(exact_model, 0.05), [1, 5, 7], 30
    kl_reward = KLRewardTransform(TransformersScorer(reference), 0.5, action_key="tokens_response")
    said = torch.cartesian_prod(torch.arange(vocabulary), torch.arange(vocabulary))
    td = TensorDict({"tokens": torch.tensor([prompt]).expand(900, 3), "tokens_response": said}, [900])
    with torch.no_grad():
        td = TransformersScorer(exact_model)(td)
        td["next"] = TensorDict({"reward": torch.full((900, 1), 2.0, dtype=torch.float64)}, [900])
        probability = td["log_probs"].sum(1).exp()
        reward = kl_reward(td)["next", "reward"].squeeze(-1)
        prefixes = torch.tensor([[*prompt, token] for token in range(vocabulary)])
        first, second = ((m(prefixes).logits[:, -2:]).log_softmax(-1) for m in (exact_model, reference))
        kls = kl_div(second, first, log_target=True, reduction="none").sum(
            -1
        )  # [vocabulary, 2]: of token 1, of token 2
        exact = kls[0, 0] + (first[0, 0].exp() * kls[:, 1]).sum()
    assert exact > 0.05
    torch.testing.assert_close((probability[:, None] * reward).sum(), 2.0 - 0.5 * exact)
    torch.testing.assert_close((probability * reward[:, 0]).sum(), -0.5 * kls[0, 0])


def test_a_language_model_in_an_environment(tiny):
    """Sampled by the policy, stepped, and penalised against the frozen copy of the weights that it had."""
    model = tiny("rotary", torch.float32)
    scorer = TransformersScorer(model)
    kl_reward = KLRewardTransform(scorer, 0.1, out_keys=["reward_kl"])
    frozen = copy.deepcopy(model)
    env = LLMEnv(from_text=False, eos_token_id=2).append_transform(Compose(kl_reward))
    actor = Actor(TransformersPolicy(model), Sampling(max_new_tokens=4))
    prompts = Ragged.from_rows(tensors([[1, 5, 7], [4], [6, 8]])).jagged()

    def play():
        return env.rollout(2, actor, tensordict=TensorDict({"tokens": prompts}, [3]), break_when_any_done=False)

    before = torch.cat(ragged.rows(play(), ("next", "reward_kl")))
    assert before.abs().max() < 1e-5  # sampled with a cache, scored without
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)
    td = play()
    assert not any(parameter.requires_grad for parameter in kl_reward.parameters())
    found = ragged.rows(td, ("next", "reward_kl"))
    steps = zip(*(ragged.rows(td, key) for key in ("tokens", "tokens_response", "log_probs")), found, strict=True)
    for prompt, answer, log_probs, row in steps:
        (expected,) = one_by_one(frozen, [prompt.tolist()], [answer.tolist()])
        torch.testing.assert_close(row.flatten(), -0.1 * (log_probs - expected))
    assert torch.cat(found).abs().max() > 0.01


def jagged(*rows):
    return Ragged.from_rows([torch.tensor(row) for row in rows]).jagged()


def test_each_row_of_a_lazy_stack_has_its_own_mask_or_none(exact_model):
    """Whichever row comes first; padding is never scored as if it were a prompt."""
    scorer, answer = TransformersScorer(exact_model), torch.tensor([7, 8])
    bare = TensorDict({"tokens": torch.tensor([1, 5]), "tokens_response": answer})
    padded = TensorDict({
        "tokens": torch.tensor([0, 1, 6]),
        "attention_mask": torch.tensor([False, True, True]),
        "tokens_response": answer,
    })  # fmt: skip
    first, second = one_by_one(exact_model, [[1, 5], [1, 6]], [[7, 8], [7, 8]])
    for rows, expected in (([bare, padded], [first, second]), ([padded, bare], [second, first])):
        torch.testing.assert_close(scorer.log_prob(lazy_stack(rows)).detach(), torch.stack(expected))
    timed = lazy_stack([lazy_stack([bare, padded]), lazy_stack([padded, padded])], 1)
    found = scorer.log_prob(timed).detach()
    torch.testing.assert_close(found, torch.stack([torch.stack([first, second]), torch.stack([second, second])]))


@pytest.mark.parametrize("layout", ["jagged", "lazy"])
def test_masked_tokens_of_ragged_responses_keep_their_places(exact_model, layout):
    """The result has the lengths of the action, and 0 where the mask is false."""
    scorer = TransformersScorer(exact_model, mask_key="m")
    said, mask = [[7, 8, 9], [4]], [[True, False, True], [True]]
    td = TensorDict(
        {"tokens": torch.tensor([[1, 5], [1, 6]]), "tokens_response": jagged(*said), "m": jagged(*mask)}, [2]
    )
    if layout == "lazy":
        rows = zip([[1, 5], [1, 6]], said, mask, strict=True)
        names = ("tokens", "tokens_response", "m")
        td = lazy_stack([TensorDict({n: torch.tensor(v) for n, v in zip(names, row, strict=True)}) for row in rows])
    first, second = one_by_one(exact_model, [[1, 5], [1, 6]], [[7, 9], [4]])
    found = [row.detach() for row in scorer.log_prob(td).unbind()]
    torch.testing.assert_close(found[0], torch.stack([first[0], first.new_zeros(()), first[1]]))
    torch.testing.assert_close(found[1], second)


def test_no_rows_have_no_log_probs(exact_model):
    """A batch of size 0, dense, masked, or jagged."""
    tokens, answers = torch.ones(0, 2).long(), torch.ones(0, 3).long()
    td = TensorDict({"tokens": tokens, "tokens_response": answers, "m": answers.bool()}, [0])
    for mask_key in (None, "m"):
        found = TransformersScorer(exact_model, mask_key=mask_key).log_prob(td)
        assert (found.shape, found.dtype) == ((0, 3), torch.float64)


def test_what_does_not_fit_is_named(exact_model):
    """An id that the model does not know, in the prompt or the response, and a mask of another length."""
    td = TensorDict({"tokens": torch.tensor([[1, 5], [1, 6]]), "tokens_response": torch.tensor([[7], [30]])}, [2])
    with pytest.raises(ModelError, match=r"'tokens_response', row 1: the id 30 is not in the model's vocabulary of 30"):
        TransformersScorer(exact_model).log_prob(td)
    td["tokens"] = torch.tensor([[1, 5], [-1, 6]])
    with pytest.raises(ModelError, match=r"'tokens', row 1: the id -1 "):
        TransformersScorer(exact_model).log_prob(td)
    td["m"] = torch.ones(2, 2).bool()
    with pytest.raises(ValueError, match="the mask 'm' does not fit 'tokens_response'"):
        TransformersScorer(exact_model, mask_key="m").log_prob(td)
