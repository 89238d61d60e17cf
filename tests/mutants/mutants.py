"""Seeded ring bugs: what is changed in which file, and the test that must notice.

Each is a bug that a ring has had somewhere. ``old`` must occur exactly once, so that a mutant never goes stale in
silence.
"""

import os
from datetime import date
from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str  # below src/ringspan
    old: str
    new: str
    test: str  # below tests, as pytest names it


DENSE = "torch/attention/test_ring.py::test_out_and_gradients_are_those_of_dense_attention"
RING = f"{DENSE}[causal-3-zigzag-64]"
RING_FULL = "torch/attention/test_ring.py::test_out_and_gradients_are_those_of_dense_attention[full-3-contiguous-64]"
SHIFT = "torch/data/test_batch.py::test_labels_are_shifted_before_the_permutation"
COUNTS = "torch/attention/test_ring.py::test_exactly_the_scheduled_messages_are_sent[ring-causal-contiguous]"
FULL_QUEUE = "torch/transport/test_shared_memory.py::test_a_full_queue_waits_for_its_reader"
FREE = "torch/transport/test_shared_memory.py::test_a_slot_is_free_when_nobody_has_a_tensor_on_its_message"
ANY = "torch/attention/test_ring.py::test_any_mask_on_any_layout"
LOSS = "torch/data/test_cross_entropy.py::test_loss_and_gradients_are_those_of_whole_logits"
TOKEN_LOSSES = (
    "torch/data/test_cross_entropy.py::test_the_loss_of_each_token_and_any_function_of_it[chunks0-extras0-dtype0]"
)
IGNORED_TARGETS = "torch/data/test_cross_entropy.py::test_tokens_without_targets_and_heads_without_biases"
EXACTLY_ONCE = "core/schedule/test_schedule.py::test_each_allowed_pair_is_computed_exactly_once"
QUERIES = "torch/attention/test_ring.py::test_the_error_does_not_grow_with_the_number_of_ranks[contiguous-pass-q]"
SEGMENTS = (
    "torch/memory/test_segments.py::"
    "test_gradients_are_the_same_with_dropout_and_autocast_and_only_the_first_input_of_a_segment_is_kept[3-False]"
)
EVENTS = "torch/attention/test_events.py::test_the_loop_sends_waits_and_holds_what_its_events_say"
ROUTERS = "torch/layers/test_router_loss.py::"
CARRIED = "core/schedule/test_schedule.py::test_blocks_carry_what_later_ranks_need_and_gradients_reach_their_owner_once"
STATES = "torch/generate/test_states.py::test_tokens_and_logits_are_those_of_one_process"
SPANS = "torch/recurrence/test_recurrence.py::"
OWN_CODE = "torch/model/attention/test_own.py::test_packed_documents_on_three_ranks_are_each_those_of_one_process"
SHARES = "core/geometry/test_shares.py::"
BALANCED = "core/geometry/test_balanced.py::"
CACHED = "torch/attention/test_cached.py::"
WRITTEN = f"{CACHED}test_a_prompt_and_then_token_after_token"
WROTE = "torch/generate/test_generate.py::test_tokens_and_logits_are_those_of_one_process"
MERGED = f"{CACHED}test_the_merge_weighs_shares_by_what_they_saw_and_counts_sinks_once"

TRAINER = "hf/test_trainer.py::"
SFT = "hf/test_sft.py::"
CHOICES = "hf/test_preferences.py::"
ROLLOUTS = "hf/test_rollouts.py::"
GRPO = "{'lora': True, 'beta': 0.1, 'num_iterations': 2}"
CLASSES = "torch/model/tasks/test_classifier.py::test_logits_of_sequences_and_gradients_are_those_of_one_process"
STEPS = "test_ten_steps_equal_one_process"
FOLDERS = "torch/weights/test_folders.py::"
THERE_AND_BACK = f"{FOLDERS}test_weights_go_there_and_back"
PARTS = "torch/weights/test_deferred.py::"
SEEN = "torch/multimodal/"
TALK = "train/test_conversations.py::"

MUTANTS = [
    Mutant(
        "an optimizer that was saved before its first step has taken one",
        "lightning/strategy.py",
        "inner.state.clear()",
        "pass",
        "lightning/test_strategy.py::test_saving_before_the_first_step_changes_nothing",
    ),
    Mutant(
        "groups of a mesh wait as long as torch says",
        "torch/runtime/timeout.py",
        "_set_pg_timeout(timedelta(seconds=seconds), group)",
        "pass",
        "torch/runtime/test_timeout.py::test_the_groups_of_a_mesh_have_the_time_out_of_the_world[2-1]",
    ),
    Mutant(
        "a trainer's gradients are summed over replicas",
        "hf/batches.py",
        'module.set_gradient_divide_factor(float(base.ring_mesh["replicate"].size()))',
        "module.set_gradient_divide_factor(1.0)",
        f"{TRAINER}{STEPS}[4-2]",
    ),
    Mutant(
        "a counted loss is not that of one process of data parallelism",
        "hf/batches.py",
        "value, gradient = (1 / replicas, 1) if is_counted else (1, replicas)",
        "value, gradient = (1, 1) if is_counted else (1, replicas)",
        f"{TRAINER}{STEPS}[4-2]",
    ),
    Mutant(
        "a trainer's logits stay in the order of the layout",
        "hf/batches.py",
        "layout = BatchLayout.of(model.ring_layout, length",
        'layout = BatchLayout.of("contiguous", length',
        f"{TRAINER}test_predictions_are_whole_and_in_order[4-2]",
    ),
    Mutant(
        "a trainer's data is dealt to ranks",
        "hf/replicas.py",
        'return self.ring_mesh["replicate"].get_local_rank()',
        "return self.ring_mesh.get_rank()",
        f"{TRAINER}{STEPS}[4-2]",
    ),
    Mutant(
        "examples that even out replicas count twice in an evaluation",
        "hf/replicas.py",
        "is_repeated = (places >= state.remainder)",
        "is_repeated = (places >= loader.total_batch_size)",
        f"{TRAINER}test_predictions_are_whole_and_in_order[4-2]",
    ),
    Mutant(
        "a batch without targets has a loss of 0 in an evaluation",
        "hf/batches.py",
        "output.loss = output.loss * torch.nan",
        "pass",
        f"{TRAINER}test_a_batch_without_targets_has_no_part_in_an_evaluation[4-2]",
    ),
    Mutant(
        "a state that goes on into the next packed document",
        "torch/model/local_pass.py",
        "        starts = tuple(starts_of([row for row in packed.rows if row is not None]))\n",
        "        starts = ((0,),) * len(packed.rows)\n",
        "hf/test_stateful.py::test_a_state_ends_with_a_packed_document[mamba2]",
    ),
    Mutant(
        "a folder that is pushed without the weights of the ring",
        "hf/trainer.py",
        "        self.model.save_pretrained(folder)\n",
        "",
        "hf/test_hub.py::test_checkpoints_are_pushed_while_a_run_goes_on",
    ),
    Mutant(
        "a reference model stays whole on every rank",
        "hf/replicas.py",
        "if evaluation_mode and (head is None or head() is None) and not is_classifier(model):",
        "if evaluation_mode:",
        f"{CHOICES}test_a_reference_model_is_split_as_the_model_is",
    ),
    Mutant(
        "examples are dealt as they came",
        "hf/balance.py",
        "yield from (step[place] for place in places.ravel())",
        "yield from step",
        "hf/test_balance.py::test_what_works_at_the_same_time_is_alike",
    ),
    Mutant(
        "ORPO averages over prompts too",
        "hf/trl/orpo.py",
        'answers = both["concatenated_labels"][:, 1:] != -100',
        "answers = out.label_mask",
        f"{CHOICES}test_steps_on_a_ring_equal_one_process[orpo-llama-{{}}]",
    ),
    Mutant(
        "a sequence ends where its last rank's part does",
        "torch/model/tasks/classifier.py",
        'dist.all_reduce(last, dist.ReduceOp.MAX, group=model.ring_mesh["ring"].get_group())',
        "pass",
        f"{CLASSES}[llama-2-1-right-options0]",
    ),
    Mutant(
        "every rank adds the token that it has at the same place",
        "torch/model/tasks/classifier.py",
        "own = torch.where(is_here.any(1, keepdim=True), pooled, 0.0)",
        "own = pooled",
        f"{CLASSES}[llama-2-1-right-options0]",
    ),
    Mutant(
        "a classifier's logits are those of one rank",
        "torch/model/tasks/classifier.py",
        "logits = Sum.apply(precise, [ring.get_group()]).to(pooled.dtype)",
        "logits = own",
        f"{CLASSES}[llama-2-1-right-options0]",
    ),
    Mutant(
        "the padding of the layout ends a sequence",
        "torch/model/tasks/classifier.py",
        "(ids != padding) & (places < length)",
        "ids != padding",
        f"{CLASSES}[llama-2-1-right-options0]",
    ),
    Mutant(
        "rewards are gathered from ranks",
        "hf/rollouts.py",
        "found = [(space, name) for space in spaces",
        "found = [(space, name) for space in spaces[:0]",
        f"{ROLLOUTS}test_replicas_normalise_their_rewards_together",
    ),
    Mutant(
        "the ranks of a ring shuffle their completions each by its own numbers",
        "hf/rollouts.py",
        "take_first_ranks_numbers(text_groups(mesh), accelerator.device)",
        "pass",
        f"{ROLLOUTS}test_steps_on_a_ring_equal_one_process[grpo-qwen3-window-"
        "{'beta': 0.0, 'sampled': True, 'temperature': 0.7}]",
    ),
    Mutant(
        "a batch that the loop splits has the gradient of one replica",
        "hf/batches.py",
        "_of_replica(self, output.loss, is_counted=False)",
        "output.loss",
        "hf/test_loop.py::test_a_loop_that_splits_its_batches_equals_one_process",
    ),
    Mutant(
        "an awaited reward that fails is told to nobody",
        "hf/rollouts.py",
        "trainer.reward_funcs[place] = failing_later(function, trainer.ring_failures)",
        "pass",
        "hf/test_rewards.py::test_a_function_that_fails_on_one_rank_raises_on_all[awaited reward]",
    ),
    Mutant(
        "a generation is counted in ranks",
        "hf/rollouts.py",
        "args.generation_batch_size = size",
        "pass",
        f"{ROLLOUTS}test_steps_on_a_ring_equal_one_process[grpo-llama-{GRPO}]",
    ),
    Mutant(
        "a trainer resumes without the optimizer's state",
        "hf/progress.py",
        "checkpoints.load(found.folder, found.manifest, state, None)",
        "pass",
        f"{TRAINER}test_a_run_resumes_on_another_ring",
    ),
    Mutant(
        "merge by plain mean",
        "torch/kernels/partials/merge.py",
        "weight = torch.sigmoid(new_lse - lse)",
        "weight = torch.full_like(lse, 0.5)",
        RING_FULL,
    ),
    Mutant(
        "lse not updated by the merge",
        "torch/kernels/partials/merge.py",
        "torch.logaddexp(lse, new_lse.to(lse.dtype), out=lse)",
        "lse.copy_(lse)",
        RING_FULL,
    ),
    Mutant(
        "merge weight the wrong way round",
        "torch/kernels/partials/merge.py",
        "torch.sigmoid(new_lse - lse)",
        "torch.sigmoid(lse - new_lse)",
        RING_FULL,
    ),
    Mutant(
        "local lse in backward",
        "torch/attention/ring.py",
        "ours = BackwardInputs(dout[:, :, rows], q[:, :, rows], *keys, out[:, :, rows], lse[:, :, rows])",
        "ours = BackwardInputs(dout[:, :, rows], q[:, :, rows], *keys, out[:, :, rows], "
        "kernel.forward(q[:, :, rows], *keys, launch, ring.scores)[1])",
        RING_FULL,
    ),
    Mutant(
        "local out in backward (delta of the block)",
        "torch/attention/ring.py",
        "ours = BackwardInputs(dout[:, :, rows], q[:, :, rows], *keys, out[:, :, rows], lse[:, :, rows])",
        "ours = BackwardInputs(dout[:, :, rows], q[:, :, rows], *keys, "
        "kernel.forward(q[:, :, rows], *keys, launch, ring.scores)[0], lse[:, :, rows])",
        RING_FULL,
    ),
    Mutant(
        "own block used at every hop (stale keys and values)",
        "torch/attention/ring.py",
        "            block = decode(coded, own.k.dtype)\n",
        "            block = Block(coded.ranges, *(x[:, :, : coded.k.shape[2]] for x in (own.k, own.v)))\n",
        RING_FULL,
    ),
    Mutant(
        "transfer not awaited",
        "torch/attention/ring.py",
        "        self.transfer.wait()\n",
        "",
        RING_FULL,
    ),
    Mutant(
        "last hop skipped",
        "core/schedule/schedule.py",
        "zip(range(len(found)), owners, found, strict=True)",
        "zip(range(max(1, len(found) - 1)), owners, found)",
        EXACTLY_ONCE,
    ),
    *(
        Mutant(
            f"attention to half of the ring in examples/{example}",
            "torch/attention/ring.py",
            "                rows, here = queries.part(launch.q0, launch.q1)[0], keys.part(launch.k0, launch.k1)\n",
            "                if hop.index:\n                    continue\n"
            "                rows, here = queries.part(launch.q0, launch.q1)[0], keys.part(launch.k0, launch.k1)\n",
            f"examples/test_{example}.py::{test}",
        )
        for example, test in (
            ("retrieval", "test_the_extension_is_that_of_one_process"),
            ("in_context_rl", "test_training_on_two_ranks_is_that_of_one"),
        )
    ),
    Mutant(
        "gradients of earlier visitors dropped",
        "torch/attention/ring.py",
        "            total.add_block(behind.pop(hop.index).wait())\n",
        "            behind.pop(hop.index).wait()\n",
        RING_FULL,
    ),
    Mutant(
        "gradients sent to their owner dropped",
        "torch/attention/ring.py",
        "        _collect(returning, local)\n        total = ",
        "        returning.clear()\n        total = ",
        RING_FULL,
    ),
    Mutant(
        "partials sent to their owner dropped",
        "torch/attention/ring.py",
        "        _collect(returning, local)\n        local.finish(",
        "        returning.clear()\n        local.finish(",
        QUERIES,
    ),
    Mutant(
        "partial of sent queries without their lse",
        "torch/attention/block.py",
        "self.add(start, stop, block.k[:, :, rows], block.v[:, :, rows].squeeze(-1))",
        "self.add(start, stop, block.k[:, :, rows], torch.zeros_like(block.v[:, :, rows].squeeze(-1)))",
        QUERIES,
    ),
    Mutant(
        "queries that saw nothing merged as if they had",
        "torch/kernels/partials/merge.py",
        "torch.sigmoid(new_lse - lse).nan_to_num_(0.0)",
        "torch.sigmoid(new_lse - lse)",
        "torch/attention/test_ring.py::test_queries_that_nobody_answers_between_others_that_several_answer",
    ),
    Mutant(
        "queries sent by the mask of the keys",
        "core/schedule/paths.py",
        "layout, keys, regions = keys, layout, transposed(regions)",
        "layout, keys = keys, layout",
        CARRIED,
    ),
    Mutant(
        "diagonal shifted into the future",
        "core/geometry/mask.py",
        'return Mask((Region(lo=0),), "causal")',
        'return Mask((Region(lo=-1),), "causal")',
        "core/geometry/test_mask.py::test_masks_are_what_their_docstrings_say[causal]",
    ),
    Mutant(
        "band rounded the wrong way on strided spans",
        "core/geometry/tile.py",
        "lo, hi = -((offset - low) // step), (high - offset) // step",
        "lo, hi = (low - offset) // step, (high - offset) // step",
        EXACTLY_ONCE,
    ),
    Mutant(
        "window passed on unchanged to each block",
        "core/geometry/meetings.py",
        "np.minimum(hi - i0 + j0, i1 - i0 - 1)",
        "np.minimum(hi, i1 - i0 - 1)",
        EXACTLY_ONCE,
    ),
    Mutant(
        "anticausal tile not mirrored",
        "torch/kernels/mirror.py",
        "kernel.forward(q.flip(2), k.flip(2), v.flip(2), _mirrored(launch), scores)",
        "kernel.forward(q, k, v, _mirrored(launch), scores)",
        ANY,
    ),
    Mutant(
        "window from the first corner",
        "core/schedule/kernel_launches.py",
        "shift = tile.num_keys - tile.num_rows",
        "shift = 0",
        "torch/kernels/test_kernels.py::test_a_band_is_a_window_from_the_last_corner",
    ),
    Mutant(
        "window with more rows than keys given to FlashAttention 2 as it is",
        "core/schedule/kernel_launches.py",
        "return (tile,) if is_read else",
        "return (tile,) if is_read or tile.num_keys else",
        "torch/kernels/test_kernels.py::test_flash_attention_2_reads_every_window_as_it_is_meant",
    ),
    Mutant(
        "triangle with more rows than keys taken for a square",
        "core/schedule/kernel_launches.py",
        "    return square, Tile.full(last, tile.q1, tile.k0, tile.k1)",
        "    return (square,)",
        "torch/kernels/test_kernels.py::test_however_tiles_are_grouped_each_pair_is_computed_once",
    ),
    Mutant(
        "row without a key taken for one that saw infinitely much",
        "torch/kernels/local/flash.py",
        "lse = lse.masked_fill(lse == torch.inf, -torch.inf)",
        "lse = lse.clone()",
        "torch/kernels/test_kernels.py::test_a_row_between_documents_saw_nothing[flash]",
    ),
    Mutant(
        "mask dropped",
        "torch/kernels/local/cpu.py",
        "_ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, tile.is_causal, scale=scores.scale)",
        "_ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scores.scale)",
        RING,
    ),
    Mutant(
        "scale forgotten in backward",
        "torch/kernels/local/cpu.py",
        "dout, q, k, v, out, lse, 0.0, tile.is_causal, scale=scores.scale",
        "dout, q, k, v, out, lse, 0.0, tile.is_causal, scale=1.0",
        RING,
    ),
    Mutant(
        "block packed from the wrong tokens",
        "core/geometry/ranges.py",
        "return packed + index - start",
        "return packed",
        ANY,
    ),
    Mutant(
        "block thinned one hop too early",
        "core/schedule/paths.py",
        "            self.carried[:, before] = np.minimum(self.carried[:, before], passed)\n",
        "",
        CARRIED,
    ),
    Mutant(
        "blocks passed on by ranks that do not compute with them",
        "core/schedule/paths.py",
        "self.is_straight[places] = 2 * np.add.reduceat(shared, starts) < np.add.reduceat(sent, starts)",
        "self.is_straight[places] = False",
        "core/schedule/test_schedule.py::test_what_a_neighbour_has_no_use_for_comes_from_its_owner",
    ),
    Mutant(
        "another rank's block sent in place of the own one",
        "torch/attention/ring.py",
        "mine.pack(straight.ranges, ring.exchange.empty)",
        "coded.pack(straight.ranges, ring.exchange.empty)",
        "torch/attention/test_custom_layout.py::test_a_document_that_skips_ranks_comes_from_its_owner",
    ),
    Mutant(
        "ranks that compute most not looked at",
        "core/schedule/timing.py",
        "in (computing, inside, outside, computing + inside + outside))",
        "in (outside,))",
        "core/schedule/test_timing.py::test_under_a_window_the_rank_between_the_first_and_the_last_is_looked_at",
    ),
    Mutant(
        "whole blocks sent where a part would do",
        "torch/attention/ring.py",
        "            sends = [(peer, packed[ranges])]\n",
        "            sends = [(peer, packed[ranges])] * 2\n",
        COUNTS,
    ),
    Mutant(
        "the same half goes either way",
        "core/schedule/route.py",
        "max(hop - 2, 0), 1 - hop % 2)",
        "max(hop - 2, 0), 0)",
        EXACTLY_ONCE,
    ),
    Mutant(
        "inner ring leaves its node",
        "core/schedule/route.py",
        "neighbour = node * inner + (place - 1) % inner",
        "neighbour = (node * inner + place - 1) % ranks",
        "core/schedule/test_schedule.py::test_a_double_ring_crosses_nodes_as_rarely_as_it_can",
    ),
    Mutant(
        "gradient of one node overwrites that of another",
        "torch/attention/ring.py",
        "        returning.append(from_visitor)",
        "        returning[:] = [from_visitor]",
        ANY,
    ),
    Mutant(
        "ranks group heads by their own tiles",
        "core/schedule/schedule.py",
        "rank, layout.ranks, hops, paths.tile_pairs,",
        "rank, layout.ranks, hops, sum(h.num_pairs for h in hops) // max(1, sum(len(h.bands) for h in hops)),",
        "torch/attention/test_ring.py::test_ranks_with_different_work_take_the_same_groups_of_heads[documents]",
    ),
    Mutant(
        "traded heads put in the wrong order",
        "core/geometry/layout.py",
        "slice(whole - (member + 1) * chunk, whole - member * chunk)",
        "slice(whole // 2 + member * chunk, whole // 2 + (member + 1) * chunk)",
        "core/schedule/test_schedule.py::test_a_group_of_ranks_holds_what_its_members_hold[4-2-zigzag]",
    ),
    Mutant(
        "shared key/value head keeps one member's gradient",
        "torch/attention/ulysses.py",
        "sharing[0] if len(sharing) == 1 else torch.stack(sharing).sum(0)",
        "sharing[0]",
        "torch/attention/test_ring.py::test_members_share_key_value_heads_when_these_are_few[4-ulysses-zigzag]",
    ),
    Mutant(
        "sinks left out of the log-sum-exp",
        "torch/kernels/partials/partial.py",
        "            self._lse.copy_(total)\n",
        "",
        ANY,
    ),
    Mutant(
        "soft cap without its derivative",
        "torch/kernels/local/eager.py",
        "        if slope is not None:\n            ds *= slope\n",
        "",
        ANY,
    ),
    Mutant(
        "ALiBi by local positions",
        "torch/attention/op.py",
        "return torch.from_numpy(layout.positions(rank)).to(device)",
        "return torch.arange(layout.tokens_per_rank).to(device)",
        ANY,
    ),
    Mutant(
        "scales of another sequence sent with codes",
        "torch/attention/comm_dtype.py",
        "x.abs().amax((2, 3), keepdim=True)",
        "x.abs().amax((2, 3), keepdim=True).flip(0)",
        "torch/attention/test_ring.py::test_a_coded_block_costs_the_same_error_on_any_number_of_ranks[int8-0.012]",
    ),
    Mutant(
        "inputs of all layers of a segment kept",
        "torch/memory/segments.py",
        "                return partial(self._input, place)\n",
        "                return self._store.put(x)\n",
        SEGMENTS,
    ),
    Mutant(
        "inputs of a segment made with other random numbers",
        "torch/memory/segments.py",
        "            torch.set_rng_state(cpu_state)\n",
        "",
        SEGMENTS,
    ),
    Mutant(
        "labels shifted after the permutation",
        "torch/data/batch.py",
        'targets = _shift(batch["labels"].long())',
        'targets = batch["labels"].long()',
        SHIFT,
    ),
    Mutant(
        "padding has targets",
        "torch/data/batch.py",
        "split.shard(targets, rank, value=IGNORED)",
        "split.shard(targets, rank, value=0)",
        SHIFT,
    ),
    Mutant(
        "masks of any values read as ones and zeros",
        "torch/data/padding.py",
        "if not torch.equal(real.to(attention_mask.dtype), attention_mask):",
        "if False:",
        "torch/data/test_batch.py::test_what_cannot_be_honoured_is_refused",
    ),
    Mutant(
        "documents dropped beside padding on the left",
        "torch/data/batch.py",
        'for name in ("position_ids", *_FLATTENED) if batch.get(name) is not None',
        'for name in ("position_ids",) if batch.get(name) is not None',
        "torch/data/test_batch.py::test_documents_behind_padding_stay_apart",
    ),
    Mutant(
        "layouts with the same positions within documents taken for one",
        "torch/consistency/forward.py",
        "if digest is not None and int(digest) != int(split.digest(rank)):",
        "if False:",
        "torch/model/tasks/test_logprobs.py::test_what_is_refused_is_refused_on_every_rank[other layout, documents of "
        "one length-LayoutError-split by another layout than zigzag, or for another]",
    ),
    Mutant(
        "ignored labels counted in the gradient",
        "torch/data/loss_blocks.py",
        "factors = self._with_target(d_losses, rows)",
        "factors = d_losses",
        IGNORED_TARGETS,
    ),
    Mutant(
        "last token of the loss left out",
        "torch/data/loss_blocks.py",
        "return slices(len(self.hidden), self.options.chunk_tokens)",
        "return slices(len(self.hidden) - 1, self.options.chunk_tokens)",
        LOSS,
    ),
    Mutant(
        "every block of tokens weighed as the first",
        "torch/data/loss_blocks.py",
        "self._differentiate(rows, normalizers.of(rows), d_losses[rows], sums, is_scanned=False)",
        "self._differentiate(rows, normalizers.of(rows), d_losses[: rows.stop - rows.start], sums, is_scanned=False)",
        TOKEN_LOSSES,
    ),
    Mutant(
        "a token's softmax not the one of its loss",
        "torch/data/loss_blocks.py",
        "return Normalizers(self.top[rows], self.exponentials[rows])",
        "return Normalizers(self.top[rows], self.exponentials.flip(0)[rows])",
        TOKEN_LOSSES,
    ),
    Mutant(
        "target looked up in the wrong block of vocabulary",
        "torch/data/loss_blocks.py",
        "return (target - columns.start).clamp(0, columns.stop - columns.start - 1).unsqueeze(1), here",
        "return target.clamp(0, columns.stop - columns.start - 1).unsqueeze(1), here",
        LOSS,
    ),
    Mutant(
        "memory of a message written again while somebody reads it",
        "torch/transport/shared_memory.py",
        "return not self._own_memory.is_marked(slot.start)",
        "return True",
        FREE,
    ),
    Mutant(
        "memory of a message taken to be free when the sender is done",
        "torch/transport/shared_memory.py",
        "        self._own_memory.mark(slot.start, reader, True)\n",
        "",
        FREE,
    ),
    Mutant(
        "message of another pass taken for the expected one",
        "torch/transport/queue.py",
        "if descriptor.tag != expected.tag:",
        "if False:",
        FULL_QUEUE,
    ),
    Mutant(
        "descriptors written again before they were read",
        "torch/transport/queue.py",
        "if number - self._words[0] > _CAPACITY:",
        "if False:",
        FULL_QUEUE,
    ),
    Mutant(
        "labels left out of what a ring compares",
        "torch/data/batch.py",
        "for x in (tokens, targets, lengths, padding)",
        "for x in (tokens, tokens, lengths, padding)",
        "torch/data/test_batch.py::test_the_digest_of_a_batch_sees_what_is_in_it_and_not_which_rank_asks",
    ),
    Mutant(
        "digest that does not see where a token is",
        "torch/transport/digest.py",
        "torch.arange(1, x.numel() + 1, device=x.device).mul_(_SPREAD)",
        "torch.ones(x.numel(), dtype=torch.int64, device=x.device)",
        "torch/consistency/test_calls.py::test_a_digest_sees_every_entry_its_place_and_the_shape",
    ),
    Mutant(
        "ranks that differ taken to be alike",
        "torch/consistency/calls.py",
        "ranks * squares == total * total",
        "ranks * squares >= total * total",
        "torch/consistency/test_calls.py::test_sums_tell_whether_all_words_are_alike",
    ),
    Mutant(
        "views given to kernels that do not look at the last stride",
        "torch/kernels/memory.py",
        "    if self.in_rows and not is_in_rows(x):\n            return False\n",
        "    if False:\n            return False\n",
        "torch/attention/test_ring.py::test_every_kernel_computes_every_view",
    ),
    Mutant(
        "dout given as it lies",
        "torch/attention/ring.py",
        "dout, q, k, v, out = kernels.laid_out(serving, dout, q, k, v, out)",
        "q, k, v, out = kernels.laid_out(serving, q, k, v, out)",
        "torch/kernels/test_kernels.py::test_the_kernels_of_cuda_are_given_rows_that_they_can_load",
    ),
    Mutant(
        "results stored like transposed queries",
        "torch/attention/ring.py",
        "if size == x.shape[-1] and is_in_rows(x):",
        "if size == x.shape[-1]:",
        "torch/kernels/test_triton.py::test_our_kernel_reads_views_and_its_sums_lie_in_rows[tokens last]",
    ),
    Mutant(
        "row without keys divided by a sink of minus infinity",
        "torch/kernels/partials/partial.py",
        ".masked_fill_(total == -torch.inf, 1)",
        "",
        "torch/attention/test_ring.py::test_a_row_without_keys_and_with_a_sink_of_minus_infinity_gives_zeros[cpu]",
    ),
    Mutant(
        "padding's gradient reaches the sinks",
        "torch/attention/ring.py",
        "delta = delta.masked_fill_((out == 0).all(-1), 0)",
        "delta = delta",
        ANY,
    ),
    Mutant(
        "regions that overlap behind another one not seen",
        "core/geometry/mask.py",
        "near = [other for other in near if other.q1 > region.q0]",
        "near = near[-1:]",
        "core/geometry/test_mask.py::test_exactly_masks_that_count_a_pair_twice_overlap",
    ),
    Mutant(
        "tangents dropped",
        "torch/attention/arguments.py",
        "if forward_ad.unpack_dual(x).tangent is not None:",
        "if False:",
        "torch/attention/test_arguments.py::test_forward_mode_is_refused_and_not_zero[operator]",
    ),
    Mutant(
        "routers balanced over padding too",
        "torch/layers/router_loss.py",
        "weights = real.to(torch.float32).unsqueeze(1)",
        "weights = torch.ones_like(real, dtype=torch.float32).unsqueeze(1)",
        f"{ROUTERS}test_it_is_transformers_own_on_scores_with_padding",
    ),
    Mutant(
        "no gradient for the scores of a router that runs in blocks",
        "torch/layers/blockwise/blocks.py",
        "d_results.append(d_each[rows].view(each.shape))",
        "d_results.append(torch.zeros_like(d_each[rows]).view(each.shape))",
        f"{ROUTERS}test_scores_of_a_router_that_runs_in_blocks_are_whole_and_have_their_gradients",
    ),
    Mutant(
        "an unknown argument of a forward pass dropped",
        "torch/model/forward_arguments.py",
        '            raise UnsupportedError(\n                f"{model_name}.forward does not take',
        '            UnsupportedError(\n                f"{model_name}.forward does not take',
        "torch/model/test_forward_arguments.py::test_an_argument_that_no_model_takes_raises_whatever_its_value",
    ),
    Mutant(
        "rows that OPT leaves unused taken for positions",
        "torch/layers/positions.py",
        'module.num_embeddings - getattr(module, "offset", 0)',
        "module.num_embeddings",
        "torch/layers/test_positions.py::test_which_tables_are_found",
    ),
    Mutant(
        "an interrupt that comes twice taken for a second one",
        "train/signals.py",
        "if now - self._interrupted >= ABORT_AFTER_SECONDS:",
        "if True:",
        "train/test_signals.py::test_the_first_is_announced_and_a_second_interrupt_aborts[numbers1-0-expected1]",
    ),
    Mutant(
        "gradients of a called head for its own parameters alone",
        "torch/layers/blockwise/head.py",
        "leaves |= {id(leaf): leaf for leaf in _leaves(losses, since=now) if leaf is not chunk}",
        "pass",
        "torch/layers/blockwise/test_head.py::test_loss_and_gradients_are_those_of_whole_logits[7-extras0-dtype0-some]",
    ),
    Mutant(
        "other dropout when a called head is called again",
        "torch/layers/blockwise/head.py",
        "            torch.set_rng_state(state)\n",
        "",
        "torch/layers/blockwise/test_head.py::test_the_gradient_adds_up_in_float32_and_dropout_draws_the_same_in_backward",
    ),
    Mutant(
        "hooks before the head not seen",
        "torch/layers/modules.py",
        '"_forward_hooks", "_forward_pre_hooks"',
        '"_forward_hooks"',
        "torch/layers/blockwise/test_head.py::test_only_a_linear_layer_as_it_is_is_its_weight",
    ),
    Mutant(
        "gradients of a sum added up in the memory of both",
        "torch/layers/blockwise/blocks.py",
        "part.clone() if memories.count(_memory(part)) > 1 else part",
        "part",
        "torch/layers/blockwise/test_feedforward.py::test_gradients_that_share_memory_add_up_apart",
    ),
    Mutant(
        "options of a look-up dropped",
        "torch/layers/embedding.py",
        "if max_norm is not None or scale_grad_by_freq or sparse:",
        "if sparse:",
        "torch/layers/test_embedding.py::test_what_a_look_up_asks_for_is_not_dropped[options2]",
    ),
    Mutant(
        "share of the first rank lost",
        "torch/attention/cached.py",
        "result = (outs * weights.unsqueeze(-1)).sum(0)",
        "result = (outs * weights.unsqueeze(-1))[1:].sum(0)",
        MERGED,
    ),
    Mutant(
        "shares merged without weights",
        "torch/attention/cached.py",
        "weights = torch.exp(lses - top)",
        "weights = torch.ones_like(lses)",
        MERGED,
    ),
    Mutant(
        "sinks counted once per rank",
        "torch/attention/cached.py",
        "merged(*forward(ring, q, k, v), sinks, self.group)",
        "merged(*forward(ring, q, k, v, sinks), sinks, self.group)",
        f"{WRITTEN}[kind0-None-True]",
    ),
    Mutant(
        "each rank computes the tokens that it keeps as if all were its own",
        "torch/attention/cached.py",
        "self.queries.positions(self.rank if self.is_split else 0)",
        "self.queries.positions(0)",
        f"{WRITTEN}[kind0-None-False]",
    ),
    Mutant(
        "window of a padded sequence one short",
        "torch/generate/masks.py",
        "UNBOUNDED if kind.window is None else kind.window - 1",
        "UNBOUNDED if kind.window is None else kind.window - 2",
        f"{WRITTEN}[kind3-real3-False]",
    ),
    Mutant(
        "padding seen",
        "torch/generate/masks.py",
        "max(k0, first), min(k1, first + count)",
        "k0, min(k1, first + count)",
        f"{WRITTEN}[kind3-real3-False]",
    ),
    Mutant(
        "chunks counted from the padding",
        "torch/generate/masks.py",
        "origin = real[0][0] if real else 0",
        "origin = 0",
        f"{WRITTEN}[kind4-real4-False]",
    ),
    Mutant(
        "two ranks keep a token",
        "core/geometry/shares.py",
        "new[self._writer].append((start, size))",
        "[of.append((start, size)) for of in (new[self._writer], new[0]) if size == 1]",
        f"{SHARES}test_each_position_is_held_once_and_stays_where_it_is",
    ),
    Mutant(
        "a block that never ends",
        "core/geometry/shares.py",
        "            self._left -= size\n",
        "",
        f"{SHARES}test_a_block_is_written_to_one_rank_over_many_steps",
    ),
    Mutant(
        "held from one position later on",
        "core/geometry/shares.py",
        "        if start + count > first:",
        "        if start + count > first + 1:",
        f"{SHARES}test_what_is_held_from_a_position_on",
    ),
    # What only ranks of the pool execute:
    Mutant(
        "a window's cache one short",
        "torch/generate/cache/cache.py",
        "max(0, length - self.kind.window + 1)",
        "max(0, length - self.kind.window + 2)",
        f"{WROTE}[mistral-2]",
    ),
    Mutant(
        "every rank keeps each new token",
        "torch/generate/cache/cache.py",
        "new if turn.is_split else new.index_select(2, turn.kept.to(new.device))",
        "new",
        "torch/generate/test_generate.py::test_every_way_to_generate_is_that_of_one_process[prompt lookup-2]",
    ),
    Mutant(
        "positions off by a share",
        "torch/generate/passes.py",
        '"position_ids": positions[..., here],',
        '"position_ids": positions[..., here] - (len(here) if ring.get_local_rank() else 0),',
        f"{WROTE}[llama-2]",
    ),
    Mutant(
        "speed of ranks measured in turn",
        "train/job.py",
        "    dist.barrier()\n    total =",
        "    total =",
        "train/test_loop.py::test_ranks_measure_how_fast_they_are_at_the_same_time",
    ),
    Mutant(
        "gradients of replicas added up in each micro-step",
        "train/job.py",
        "self.model.set_requires_all_reduce(number == settings.accumulation_steps)",
        "self.model.set_requires_all_reduce(True)",
        "train/test_loop.py::test_replicas_add_their_gradients_up_once_a_step",
    ),
    # The last one is run first: ranks wait ten seconds for a message.
    Mutant(
        "gradient sent to the neighbour of its owner",
        "torch/attention/ring.py",
        "Send(hop.owner, hop.gradient_to_owner)",
        "Send((hop.owner + 1) % ring.schedule.ranks, hop.gradient_to_owner)",
        "torch/attention/test_ring.py::test_out_and_gradients_are_those_of_dense_attention[causal-4-zigzag-128]",
    ),
    Mutant(
        "wait for a transfer missing among the events",
        "core/schedule/events.py",
        "            yield Wait(transfer.number)\n",
        "",
        EVENTS,
    ),
    Mutant(
        "gradients on their way counted in float32",
        "core/schedule/events.py",
        'shape.kv_numbers * _BFLOAT16 if part.gradient_comm_dtype == "bfloat16" else token',
        "token",
        EVENTS,
    ),
    Mutant(
        "what is sent counted as free at once",
        "core/schedule/events.py",
        "        for buffer in transfer.sends:\n            buffer.holders += 1\n",
        "",
        EVENTS,
    ),
    Mutant(
        "query block held while the next one is waited for",
        "torch/attention/ring.py",
        "rows, here = queries.part(launch.q0, launch.q1)[0], keys.part(launch.k0, launch.k1)",
        "(rows, _), here = queries.part(launch.q0, launch.q1), keys.part(launch.k0, launch.k1)",
        EVENTS,
    ),
    Mutant(
        "a late chunk taken one token too early",
        "core/geometry/cuts.py",
        "(rank, stop - (count - first), count - first)]",
        "(rank, stop - (count - first) - 1, count - first)]",
        f"{BALANCED}test_every_position_is_held_once_and_every_rank_holds_as_many",
    ),
    Mutant(
        "a chunk of a cut document lost",
        "core/geometry/placing.py",
        "ranks = ranks[: int(filled.searchsorted(tokens)) + 1]",
        "ranks = ranks[: int(filled.searchsorted(tokens))]",
        f"{BALANCED}test_every_position_is_held_once_and_every_rank_holds_as_many",
    ),
    Mutant(
        "documents placed without looking at their work",
        "core/geometry/placing.py",
        "                lacking[one] -= some\n",
        "",
        f"{BALANCED}test_documents_as_they_come_are_balanced_and_sent_less_than_by_zigzag[lognormal-262144-4]",
    ),
    Mutant(
        "cut documents not levelled",
        "core/geometry/cuts.py",
        "lacking[old.ranks] = after",
        "lacking[old.ranks] = before",
        f"{BALANCED}test_work_goes_on_from_rank_to_rank_over_the_documents_that_they_share",
    ),
    Mutant(
        "an uneven layout not made again",
        "core/geometry/balanced.py",
        "        if above <= found[-1].mean:\n",
        "        if found:\n",
        f"{BALANCED}test_what_the_first_leeway_leaves_uneven_is_placed_again",
    ),
    Mutant(
        "work above what ranks lack given in proportion",
        "core/geometry/placing.py",
        "        shares += max(0.0, wanted - float(shares.sum())) / len(ranks)\n",
        "",
        f"{BALANCED}test_more_work_than_all_lack_is_shared_evenly",
    ),
    Mutant(
        "a document placed on two ranks",
        "core/geometry/placing.py",
        "        runs = runs[runs[:, 2] > 0]\n",
        "        runs = runs[runs[:, 2] > 0]\n        runs = np.concatenate((runs, runs[:1]))\n",
        f"{BALANCED}test_every_position_is_held_once_and_every_rank_holds_as_many",
    ),
    Mutant(
        "documents that are placed together in no run",
        "core/geometry/placing.py",
        "                self.home[documents[done : done + len(homes)]] = homes\n",
        "",
        f"{BALANCED}test_every_position_is_held_once_and_every_rank_holds_as_many",
    ),
    Mutant(
        "runs of a layout stored in another order than said",
        "core/geometry/layout.py",
        'parts = "/".join(",".join(f"{span.start}+{span.count}" for span in held) for held in self.parts)',
        'parts = "/".join(",".join(f"{span.start}+{span.count}" for span in held[::-1]) for held in self.parts)',
        f"{BALANCED}test_a_layout_reads_back_from_its_text",
    ),
    Mutant(
        "a state that is not scanned on",
        "torch/recurrence/exchange.py",
        "prefixes[target] = applied(own, parts[0], is_matrix) + prefixes[target]",
        "prefixes[target] = prefixes[target]",
        f"{SPANS}test_spans_compute_what_the_oracle_computes_of_each_document[mamba-2]",
    ),
    Mutant(
        "targets that are not shifted in conversations",
        "train/data/seen.py",
        '"shift_labels": _padded(targets[1:], length, IGNORED)',
        '"shift_labels": _padded(targets, length, IGNORED)',
        f"{TALK}test_tokens_that_stand_for_images_are_no_targets",
    ),
    Mutant(
        "images as targets in conversations",
        "train/data/seen.py",
        "tokens.masked_fill(torch.isin(tokens, self._placeholders), IGNORED)",
        "tokens.clone()",
        f"{TALK}test_tokens_that_stand_for_images_are_no_targets",
    ),
    Mutant(
        "maps that travel uncounted in a plan",
        "core/recurrence/traffic.py",
        "state + map_ * message.has_map",
        "state",
        "plan/model/test_hybrids.py::test_messages_of_many_spans_carry_maps[zigzag-16-False]",
    ),
    Mutant(
        "a second pass over spans that a plan does not time",
        "plan/cost/states.py",
        "twice = 1.0 if ranks > 1 else 0.0",
        "twice = 0.0",
        "plan/model/test_hybrids.py::test_a_state_is_computed_once_more_each_way_where_it_travels",
    ),
    Mutant(
        "a halo that is one short",
        "core/recurrence/halo.py",
        "return min(found, width)",
        "return min(found, width - 1)",
        f"{SPANS}test_a_convolution_reaches_back_over_spans_and_no_further_than_its_document",
    ),
    Mutant(
        "a decay that is left out of a span's map",
        "torch/recurrence/rules.py",
        'return (arguments["A"].to(end.dtype) * total).exp()[:, :, None, None], end',
        'return (arguments["A"].to(end.dtype) * total * 0).exp()[:, :, None, None], end',
        f"{SPANS}test_spans_compute_what_the_oracle_computes_of_each_document[mamba-2]",
    ),
    Mutant(
        "a document's start that a state runs over",
        "torch/recurrence/plan.py",
        "yield LocalPiece(first, first + count, number > 0 and not begins)",
        "yield LocalPiece(first, first + count, number > 0)",
        f"{SPANS}test_spans_compute_what_the_oracle_computes_of_each_document[gated delta rule]",
    ),
    Mutant(
        "a document's start inside a span that passes its state on",
        "core/recurrence/spans.py",
        "return continues(places, number, starts) and len(pieces_of(places[number], starts)) == 1",
        "return continues(places, number, starts)",
        f"{SPANS}test_spans_compute_what_the_oracle_computes_of_each_document[mamba-2]",
    ),
    Mutant(
        "gradients of states that are sent the wrong way",
        "torch/recurrence/recurrence.py",
        "dends = scan_states(maps, gammas, self.text, self.rule.is_matrix, True)",
        "dends = scan_states(maps, gammas, self.text, self.rule.is_matrix, False)",
        f"{SPANS}test_spans_compute_what_the_oracle_computes_of_each_document[lightning attention]",
    ),
    Mutant(
        "a map that is not transposed in backward",
        "torch/recurrence/exchange.py",
        "    if reverse and is_matrix:\n        maps = maps.mT\n",
        "",
        f"{SPANS}test_spans_compute_what_the_oracle_computes_of_each_document[gated delta rule]",
    ),
    Mutant(
        "layers that are computed again with the documents of a later batch",
        "torch/recurrence/current.py",
        "            with passing(sequences):\n                return function(*args)",
        "            return function(*args)",
        f"{SPANS}test_what_is_kept_is_not_computed_again_and_is_of_its_own_pass",
    ),
    Mutant(
        "a table of positions whose first rows are taken for tokens'",
        "torch/layers/numbering.py",
        "return positions if current_turn() is not None else positions + self.offset",
        "return positions",
        f"{OWN_CODE}[roberta]",
    ),
    Mutant(
        "a decoder that numbers each rank's tokens from 0",
        "torch/layers/numbering.py",
        "        positions = self.ring_positions\n",
        "        positions = None\n",
        f"{OWN_CODE}[bart]",
    ),
    Mutant(
        "attention without its ALiBi",
        "torch/model/attention/function.py",
        "slopes=asked.slopes,",
        "slopes=None,",
        f"{OWN_CODE}[bloom]",
    ),
    Mutant(
        "a head without the layers before it",
        "torch/layers/blockwise/head.py",
        "return joined(parts) if parts else model.get_output_embeddings()",
        "return model.get_output_embeddings()",
        f"{OWN_CODE}[roberta]",
    ),
    Mutant(
        "a window of a model that names it in its own way, left out",
        "torch/layers/decoder.py",
        'LayerKind(window=window if kind == "local" else None) for kind in config.attention_layers',
        "LayerKind() for kind in config.attention_layers",
        f"{OWN_CODE}[gpt_neo]",
    ),
    Mutant(
        "a chunk of a prompt that does not begin from the cache's state",
        "torch/recurrence/recurrence.py",
        "self.run(arguments, number, begin if number == 0 else None)",
        "self.run(arguments, number, None)",
        f"{STATES}[mamba2-2]",
    ),
    Mutant(
        "a cache that keeps the state behind the first span",
        "torch/recurrence/recurrence.py",
        "last = len(job.plan.places) - 1",
        "last = 0",
        f"{STATES}[mamba2-2]",
    ),
    Mutant(
        "a convolution that begins anew at each chunk of a prompt",
        "torch/recurrence/recurrence.py",
        "if before is not None and reach < width:",
        "if before is not None and reach > width:",
        f"{STATES}[lfm2-2]",
    ),
    Mutant(
        "a cache that keeps the last inputs of its own rank alone",
        "torch/generate/cache/states.py",
        "    dist.all_reduce(last, group=turn.group)  # each input is of one rank\n",
        "",
        f"{STATES}[lfm2-2]",
    ),
    Mutant(
        "a split weight read from its beginning",
        "torch/weights/deferred.py",
        "return part(x, _moved(region, dim % x.ndim, offset))",
        "return part(x, region)",
        f"{PARTS}test_each_part_is_that_of_the_whole",
    ),
    Mutant(
        "all experts read for a few",
        "torch/weights/deferred.py",
        "return torch.stack([part(each, inner) for each in chosen], dim)",
        "return torch.stack([whole(each) for each in tensors], dim)[region]",
        f"{PARTS}test_no_more_is_read_than_a_part_is_made_of",
    ),
    Mutant(
        "a replica that reads for itself what the first one sends",
        "torch/weights/loading.py",
        "dist.broadcast(message, group=mesh.get_group(axis), group_src=0)",
        "pass",
        f"{THERE_AND_BACK}[gpt2-4-sizes19]",
    ),
    Mutant(
        "tied weights written twice",
        "torch/weights/saving.py",
        "names.setdefault(id(tensor), []).append(name)",
        "names[id(name)] = [name]",
        f"{THERE_AND_BACK}[gpt2-4-sizes19]",
    ),
    Mutant(
        "an index before its files",
        "torch/weights/writing.py",
        "key=lambda name: name == last):",
        "key=lambda name: name != last):",
        f"{FOLDERS}test_the_last_file_makes_a_model",
    ),
    Mutant(
        "examples that Lightning shuffles unasked",
        "lightning/seams.py",
        "shuffle=isinstance(sampler, RandomSampler)",
        "shuffle=True",
        "lightning/test_strategy.py::test_a_fit_equals_one_process",
    ),
    Mutant(
        "a program with the first sequence's documents for all",
        "torch/attention/traced.py",
        "found = found[:1] if len(set(found)) == 1 else found",
        "found = found[:1]",
        "torch/layers/test_compiled.py::test_layers_compute_the_same_in_few_programs[llama-batches2-options2-changes2-2]",
    ),
    Mutant(
        "an embedding comes one token too late",
        "torch/multimodal/shares.py",
        "torch.from_numpy(np.argsort(local[here][arriving])),",
        "torch.from_numpy(np.argsort(local[here][arriving])).roll(1),",
        f"{SEEN}test_shares.py::test_every_embedding_comes_to_its_token",
    ),
    Mutant(
        "a frame is computed on two ranks",
        "torch/multimodal/shares.py",
        "range(bounds[rank], bounds[rank + 1])",
        "range(bounds[rank], min(bounds[rank + 1] + 1, len(costs)))",
        f"{SEEN}test_shares.py::test_units_are_shared_out_in_order_and_evenly",
    ),
    Mutant(
        "a text goes on from its number of tokens behind images",
        "torch/generate/positions.py",
        "return text + shift",
        "return text",
        f"{SEEN}test_turns.py::test_passes_go_on_behind_images[qwen2_5_vl]",
    ),
    Mutant(
        "a cache is loaded without the positions of its images",
        "torch/generate/cache/saved.py",
        "cache.keep_ids(ids, shifts)",
        "cache.keep_ids(ids)",
        f"{SEEN}test_turns.py::test_conversations_by_turns_are_those_of_one_process_that_reads_all[qwen2_5_vl]",
    ),
    Mutant(
        "an image that does not fit is said to be of the example before",
        "torch/multimodal/cuts.py",
        "sum(end <= before for end in accumulate(counts))",
        "sum(end < before for end in accumulate(counts))",
        f"{SEEN}test_refusals.py::test_the_example_is_the_one_whose_tokens_come_next",
    ),
    Mutant(
        "gradients of embeddings do not go back to the rank that made them",
        "torch/multimodal/shares.py",
        "return _traded(gradients[0], ctx.receive, ctx.send, ctx.group), None",
        "return torch.zeros_like(_traded(gradients[0], ctx.receive, ctx.send, ctx.group)), None",
        f"{SEEN}test_training.py::"
        "test_the_ring_gives_the_loss_and_gradients_of_one_process[llava-2-examples0-zigzag-options0]",
    ),
    Mutant(
        "tokens of an image see earlier ones alone",
        "torch/attention/traced.py",
        "Mask((*before.regions, *later),",
        "Mask((*before.regions, *tuple(later)[:0]),",
        f"{SEEN}test_token_types.py::test_blocks_see_their_later_tokens[None-None]",
    ),
    Mutant(
        "a plan counts the images of a whole ring on each rank",
        "plan/model/kinds.py",
        "return -(-batch * self.units // ranks)",
        "return batch * self.units",
        "plan/model/test_towers.py::test_what_towers_keep_falls_with_the_ring",
    ),
    Mutant(
        "a plan leaves out what layers of towers keep",
        "plan/model/measured.py",
        "sum(x.untyped_storage().nbytes() for x in kept.values())",
        "sum(x.untyped_storage().nbytes() for x in [*kept.values()][::2])",
        "plan/model/test_towers.py::test_what_a_rank_keeps_and_sends_is_predicted_to_the_byte[0-llava-none]",
    ),
    Mutant(
        "a beam sees the images of another prompt",
        "torch/multimodal/prompts.py",
        "[:, self._columns].repeat_interleave(self._repeats, 0)",
        "[:, self._columns].repeat(self._repeats, 1)",
        f"{SEEN}test_generate.py::test_every_beam_sees_the_images_of_its_own_prompt[llava]",
    ),
    Mutant(
        "a frame is causal in itself",
        "core/geometry/mask.py",
        "(Region(ends[i], ends[i + 1], ends[max(0, i + 1 - window)], ends[i + 1]) for",
        "(Region(ends[i], ends[i + 1], ends[max(0, i + 1 - window)], ends[i + 1], 0) for",
        "core/geometry/test_mask.py::test_frames_see_themselves_and_earlier_ones[None]",
    ),
    Mutant(
        "what a rank has not compared is taken for right",
        "conformance/ranks.py",
        "(math.inf, 0.0)",
        "(0.0, 0.0)",
        "conformance/test_conformance.py::test_what_is_not_compared_on_every_rank_fails[found1]",
    ),
    Mutant(
        "a character in several tokens counts with each of them",
        "evaluate/perplexity.py",
        "text[reached:stop]",
        "text[min(reached, max(stop - 1, 0)) : stop]",
        "evaluate/test_perplexity.py::test_the_bytes_of_all_tokens_are_those_of_the_text[tokenizer1]",
    ),
    Mutant(
        "records of an adapter do not tell its base model",
        "evaluate/records.py",
        "(folder, base_folder(folder))",
        "(folder, folder)",
        "evaluate/test_runner.py::test_records_of_an_adapter_begin_anew_with_another_base",
    ),
    Mutant(
        "an evaluation that continues asks all again",
        "evaluate/runner.py",
        "return [key for key in planned.keys if key not in records.by_key]",
        "return planned.keys",
        "evaluate/test_resuming.py::test_a_killed_run_continues_after_its_last_item_under_torchrun",
    ),
    Mutant(
        "requests of lm-eval that are answered are asked again",
        "evaluate/harness/lm.py",
        "if known is None]",
        "if known is None or at]",
        "evaluate/harness/test_answers.py::test_a_killed_run_answers_what_is_left_and_has_lm_evals_own_results",
    ),
]


def chosen() -> list[Mutant]:
    """Return all mutants, or, with RINGSPAN_SAMPLE=12, the next twelve each day, spread over the list."""
    count = int(os.environ.get("RINGSPAN_SAMPLE") or len(MUTANTS))
    stride = max(1, len(MUTANTS) // count)
    first = int(os.environ.get("RINGSPAN_DAY") or date.today().toordinal())
    return [MUTANTS[(first + index * stride) % len(MUTANTS)] for index in range(min(count, len(MUTANTS)))]
