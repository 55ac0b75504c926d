"""The defects, by the part of the source that they are planted in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """One change of the source.

    Attributes:
        what: The defect, in words.
        file: Where, below ``src/zerofunc``.
        old: What stands there, once.
        new: What stands there instead.
        tests: Test functions that notice it, as ``file::function``; the file is below ``tests``, without its ending.
    """

    what: str
    file: str
    old: str
    new: str
    tests: str


PAGES = [
    Defect(
        "a part ends where the parameter does not",
        "pages/layout.py",
        "min(max(slot.offset + slot.numel, first), last))",
        "min(slot.offset + slot.numel, last))",
        "test_layout::test_every_element_lies_on_one_rank",
    ),
    Defect(
        "a part begins one rank too far",
        "pages/layout.py",
        "part, first = self.in_page(index, rank), rank * self.shard_numel",
        "part, first = self.in_page(index, rank), 0",
        "test_layout::test_the_parts_on_a_rank_follow_each_other",
    ),
    Defect(
        "a parameter's range is counted from its page",
        "pages/layout.py",
        "start = min(max(part.start - slot.offset, 0), slot.numel)",
        "start = part.start",
        "test_layout::test_every_element_lies_on_one_rank",
    ),
    Defect(
        "pages are not padded",
        "pages/layout.py",
        "return -(-self.numel // self.num_shards)",
        "return self.numel // self.num_shards",
        "test_layout::test_every_element_lies_on_one_rank",
    ),
    Defect(
        "a page never ends",
        "pages/layout.py",
        "filled[key] + numel > page_numel",
        "False",
        "test_layout::test_a_page_of_several_parameters_is_within_the_limit",
    ),
    Defect(
        "pages are never gathered ahead",
        "pages/read_order.py",
        "return following if is_sure else None",
        "return None",
        "test_residency::test_pages_are_gathered_ahead_when_they_followed_twice_and_are_never_evicted_for_nothing",
    ),
    Defect(
        "pages are gathered ahead on every guess",
        "pages/read_order.py",
        "return following if is_sure else None",
        "return following",
        "test_read_order::test_a_page_is_foreseen_when_it_followed_the_last_two_twice_in_a_row",
    ),
    Defect(
        "the first page that was gathered is evicted, not the one read longest ago",
        "pages/pager.py",
        "self._resident.move_to_end(member)",
        "pass",
        "test_residency::test_the_page_that_was_read_longest_ago_is_evicted",
    ),
    Defect(
        "a release keeps the buffers",
        "pages/pager.py",
        "            self._drop(page)\n        self.pool.clear()",
        "            self._drop(page)",
        "test_residency::test_released_pages_leave_no_memory_behind",
    ),
    Defect(
        "a page gathered ahead may evict the one being read",
        "pages/pager.py",
        "self._gather(following, keep=self._unit(page))",
        "self._gather(following)",
        "test_residency::test_a_page_gathered_ahead_leaves_room_for_what_stays",
    ),
    Defect(
        "what is gathered ahead takes no account of pinned pages",
        "pages/pager.py",
        "together = {*self._unit(page), *self._unit(following), *stays}",
        "together = {*self._unit(page), *self._unit(following)}",
        "test_residency::test_a_page_gathered_ahead_leaves_room_for_what_stays",
    ),
    Defect(
        "a gathered page is taken for current after its shards have changed",
        "pages/pager.py",
        "if resident is None or resident.version != version or",
        "if resident is None or",
        "test_misuse::test_shards_changed_by_hand_are_seen_by_the_next_forward",
    ),
    Defect(
        "a backward over changed shards is not refused",
        "pages/pager.py",
        "if torch._C._current_graph_task_id() != -1:",
        "if False:",
        "test_misuse::test_a_shard_changed_by_hand_before_the_backward_raises_at_stage_3",
    ),
    Defect(
        "small pages are not kept",
        "pages/pager.py",
        "if page.gathered_bytes <= min(self.persistence_bytes, self.persistence_limit_bytes - held):",
        "if False:",
        "test_memory::test_small_pages_stay_gathered_up_to_a_limit",
    ),
    Defect(
        "a pinned page that ranks wrote differently stays so",
        "pages/pager.py",
        "self._uneven.add(page)",
        "pass",
        "test_misuse::test_ranks_that_draw_different_numbers_agree_in_the_next_forward",
    ),
    Defect(
        "the unchanged digits of a master are lost",
        "pages/page.py",
        "shard.copy_(torch.where(shard.to(part.dtype) == part, shard, part.to(shard.dtype)))",
        "shard.copy_(part.to(shard.dtype))",
        "test_residency::test_a_write_of_the_values_that_are_there_keeps_the_digits_of_masters",
    ),
    Defect(
        "frozen parameters of low precision keep no master when they are thawed",
        "pages/page.py",
        "if self.trained_dtype in (None, self.master.dtype) or",
        "if True or",
        "test_what_is_sharded::test_frozen_low_precision_parameters_have_no_masters_until_they_are_thawed",
    ),
    Defect(
        "frozen parameters of low precision have float32 masters",
        "pages/building.py",
        "has_masters = is_trained or not all(_is_low(parameter.dtype) for parameter in parameters)",
        "has_masters = True",
        "test_what_is_sharded::test_frozen_low_precision_parameters_have_no_masters_until_they_are_thawed",
    ),
    Defect(
        "hooks of a parameter from before sharding are lost",
        "pages/building.py",
        "parameter.data = own_part(page.full, slot.offset, slot.shape)  # hooks and graphs of it stay as they are",
        "_swap_for(place, parameter, pager)\n            parameter._backward_hooks = None",
        "test_what_is_sharded::test_hooks_from_before_sharding_stay",
    ),
    Defect(
        "a kept graph of weight_norm is not let go",
        "pages/building.py",
        "setattr(inner, hook.name, getattr(inner, hook.name).detach())",
        "pass",
        "test_what_is_sharded::test_a_weight_that_a_hook_derives_is_trained",
    ),
    Defect(
        "the norm of a shard is this rank's own",
        "pages/norms.py",
        "total = axis.sum(power, label) ** (1 / (ord or 1.0))",
        "total = power ** (1 / (ord or 1.0))",
        "test_gradients_of_parameters",
    ),
    Defect(
        "GradScaler skips a step on one rank alone",
        "pages/norms.py",
        "    for axis in axes.values():\n        share_infinities(found_inf, axis)",
        "    del axes",
        "test_gradients_of_parameters",
    ),
    Defect(
        "a shard whose data are assigned trains on nothing",
        "pages/parts.py",
        'take_values(self, value, "the parameter of this shard")',
        "pass",
        "test_writes_into_parameters test_optimizers",
    ),
    Defect(
        "values of another shape are taken",
        "pages/parts.py",
        "if found != expected:",
        "if False:",
        "test_misuse test_writes_into_parameters",
    ),
]

GRADIENTS = [
    Defect(
        "a nested backward counts what was accumulated twice",
        "gradients/reduction.py",
        "backward.borrowed[number], self._accumulated[number] = self._accumulated[number], Local()",
        "backward.borrowed[number] = self._accumulated[number]",
        "test_accumulation test_order_of_collectives",
    ),
    Defect(
        "gradients are added up, not averaged",
        "gradients/reduction.py",
        "(self.axes.num_ranks if self.policy.average else 1)",
        "1",
        "test_uneven::test_training_uses_the_data_there_is",
    ),
    Defect(
        "a gradient that comes after its page's reduction is lost",
        "gradients/reduction.py",
        "for number, flag in enumerate(merged[len(flags) :].tolist()):",
        "for number, flag in enumerate([]):",
        "test_late_gradients test_order_of_collectives",
    ),
    Defect(
        "a rank holds as many full gradients as it likes",
        "gradients/reduction.py",
        "while ready - backward.started + len(backward.flights) > self.in_flight:",
        "while False:",
        "test_order_of_collectives::test_few_pages_of_gradient_are_alive_whatever_ranks_use test_memory",
    ),
    Defect(
        "a failed backward leaves what it has packed",
        "gradients/reduction.py",
        "if self._running is not None and not self._running.is_alive:",
        "if False:",
        "test_misuse::test_a_failed_backward_leaves_nothing_behind_once_gradients_are_zeroed test_divergence",
    ),
    Defect(
        "a first gradient of an unused parameter is zero instead of None",
        "gradients/reduction.py",
        "        if not flag:\n            continue\n        part = alias",
        "        part = alias",
        "test_late_gradients test_training test_gradients_of_parameters",
    ),
    Defect(
        "unused parameters are no error where that is asked for",
        "gradients/reduction.py",
        "        if need_all:\n",
        "        if False:\n",
        "test_accumulation::test_an_unused_parameter_is_an_error_where_that_is_asked_for",
    ),
    Defect(
        "an assigned gradient is forgotten",
        "gradients/reduction.py",
        "shard.assigned, shard.reduce = gradient.detach(), self.reduce_owed",
        "pass",
        "test_gradients_of_parameters",
    ),
    Defect(
        "an infinity of a batch that counts nothing becomes NaN",
        "gradients/reduction.py",
        "if factor == 0:  # an infinity counts nothing either",
        "if False:",
        "test_uneven::test_an_infinite_gradient_of_a_repeated_batch_counts_nothing",
    ),
    Defect(
        "copies of a shard are not summed on a mesh of two axes",
        "gradients/reduction.py",
        "if self.axes.main is not self.axes.replicate:",
        "if False:",
        "test_muon::test_muon_equals_one_process_where_shards_are_replicated test_process_groups",
    ),
    Defect(
        "backwards end in the order in which a rank has reached them",
        "gradients/backwards.py",
        "waiting = sorted(self.reached, key=lambda reducer: reducer.place, reverse=True)",
        "waiting = list(self.reached)",
        "test_order_of_collectives",
    ),
    Defect(
        "p.grad is None where plain PyTorch has a gradient",
        "pages/held_parameter.py",
        "return found.read(*place)",
        "return None",
        "test_gradients_of_parameters",
    ),
]

RANKS = [
    Defect(
        "ranks that run different programs are not told",
        "ranks/agreement.py",
        "if len({digest for digest, *_ in rows}) > 1:",
        "if False:",
        "test_misuse::test_ranks_that_read_different_pages_are_told_what_each_wanted",
    ),
    Defect(
        "nobody helps a rank that asks",
        "ranks/agreement.py",
        "if not any(is_asking for _, is_asking, *_ in rows):",
        "if True:",
        "test_order_of_collectives",
    ),
    Defect(
        "no rank starts what another has completed",
        "ranks/agreement.py",
        "            if count:\n                wished",
        "            if False:\n                wished",
        "test_order_of_collectives",
    ),
    Defect(
        "groups are named by how many groups a process is in",
        "ranks/process_groups.py",
        "members = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]",
        "members = str(len(distributed_c10d._world.pg_map))",
        "test_process_groups",
    ),
    Defect(
        "the time-out of init_distributed does not count",
        "ranks/process_groups.py",
        '_timeouts_of(world_group())["default"] = timeout_s',
        "pass",
        "test_process_groups::test_the_time_out_of_init_distributed_is_that_of_shard",
    ),
    Defect(
        "the memory of a gather whose owner is gone is given up",
        "ranks/collectives.py",
        "kept.append(replace(pending, tensors=tensors))",
        "del kept, pending, tensors",
        "test_residency",
    ),
    Defect(
        "the numbers of a mesh's ranks are transposed",
        "ranks/collectives.py",
        "self.shard.broadcast(tensor, label, source % self.shard.size)",
        "self.shard.broadcast(tensor, label, source // self.shard.size)",
        "test_residency::test_on_a_mesh_of_two_axes_the_writer_is_that_rank_of_the_mesh",
    ),
]

MODULE = [
    Defect(
        "a module that is put in after sharding goes unnoticed",
        "module/structure.py",
        "            if name not in before:\n",
        "            if False:\n",
        "test_what_is_sharded::test_a_change_of_the_module_is_noticed_before_a_step_and_a_save",
    ),
    Defect(
        "parameters that share memory become copies",
        "module/admission.py",
        "        if start < last:\n",
        "        if False:\n",
        "test_what_is_sharded::test_parameters_that_share_memory_are_refused_by_name",
    ),
    Defect(
        "parameters side by side are taken for shared",
        "module/admission.py",
        "        if start < last:\n",
        "        if start <= last and last:\n",
        "test_what_is_sharded::test_parameters_side_by_side_in_one_storage_are_sharded",
    ),
    Defect(
        "an embedding that renormalises its rows is sharded",
        "module/admission.py",
        "inner.max_norm is not None:",
        "False:",
        "test_writes_into_parameters",
    ),
    Defect(
        "values that ranks have built differently are taken",
        "module/admission.py",
        "    if unlike:\n",
        "    if False:\n",
        "test_order_of_building",
    ),
    Defect(
        "buffers are sent though nobody asked",
        "module/sharding.py",
        'if module.training and sharding.settings.get("broadcast_buffers") and',
        "if module.training and",
        "test_buffers_of_modules",
    ),
    Defect(
        "buffers are not sent where that is asked for",
        "module/sharding.py",
        'if module.training and sharding.settings.get("broadcast_buffers") and',
        "if False and",
        "test_buffers_of_modules",
    ),
    Defect(
        "other settings of a second engine are not named",
        "module/sharding.py",
        "        if other:\n",
        "        if False:\n",
        "test_what_is_sharded::test_other_settings_of_a_second_engine_are_named",
    ),
    Defect(
        "a step over state of other sizes is made",
        "module/sharding.py",
        "1 < len(value) != len(parameter):",
        "False:",
        "test_optimizer_state::test_state_of_shards_of_other_sizes_is_refused_before_the_step",
    ),
    Defect(
        "a write between backward and step erases the step",
        "module/sharding.py",
        "sharding.see_changes()  # what was written into parameters since the forward is stepped from",
        "pass",
        "test_writes_into_parameters::test_a_write_between_backward_and_step_counts",
    ),
]

SPACE = [
    Defect(
        "the padding of a part is not counted once for every shard",
        "space/transposed.py",
        "return padded * ctx.num_shards, None, None, None",
        "return padded, None, None, None",
        "test_parameter_space test_misuse::test_trees_go_to_full_tensors_and_back",
    ),
    Defect(
        "a sum over ranks is pulled back as a sum",
        "space/transposed.py",
        "        return None, Mean.apply(ctx.sharding, gradient, ctx.label), None\n\n    @staticmethod\n"
        "    def jvp(ctx: Any, _: None, tangent: torch.Tensor, __: None) -> Any:\n        return Total",
        "        return None, Total.apply(ctx.sharding, gradient, ctx.label), None\n\n    @staticmethod\n"
        "    def jvp(ctx: Any, _: None, tangent: torch.Tensor, __: None) -> Any:\n        return Total",
        "test_inner_products test_parameter_space",
    ),
    Defect(
        "the basis vectors of all ranks are pushed at once",
        "space/transposed.py",
        "if any(ahead[1] > behind[0] for ahead, behind in itertools.pairwise(ranges)):",
        "if False:",
        "test_parameter_space::test_jacfwd_and_hessian_of_torch_would_mix_ranks_and_are_refused",
    ),
    Defect(
        "a collective is traced as a constant",
        "space/transposed.py",
        "if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:",
        "if False:",
        "test_parameter_space test_transforms::test_every_transform_equals_plain_pytorch",
    ),
    Defect(
        "a gradient of which the tangent alone is wanted is reduced",
        "space/transposed.py",
        "return self._level == _level()",
        "return False",
        "test_curvature::test_a_product_reduces_no_gradient_that_nobody_asked_for",
    ),
    Defect(
        "a gradient that the loss takes is not reduced",
        "space/transposed.py",
        "return self._level == _level()",
        "return self._level is not None",
        "test_curvature::test_a_loss_may_contain_gradients_and_a_product_be_differentiated",
    ),
    Defect(
        "overrides stay on modules that are registered twice",
        "space/functional.py",
        "            held.update(own)",
        "            pass",
        "test_odd_parameters::test_overrides_of_a_module_registered_twice_do_not_stay",
    ),
    Defect(
        "full tensors of another shape are taken",
        "space/functional.py",
        "        if tensor.shape != shapes[name]:\n",
        "        if False:\n",
        "test_parameter_space",
    ),
    Defect(
        "the gramian is this rank's own",
        "space/inner_products.py",
        'Total.apply(sharding, torch.stack(products).sum(0), "gramian")',
        "torch.stack(products).sum(0)",
        "test_inner_products::test_the_gramian_of_several_losses_is_that_of_one_process",
    ),
    Defect(
        "numbers that are drawn depend on the number of ranks",
        "space/trees.py",
        "parts[name] = full[place.range(sharding.rank)]",
        "parts[name] = full[: sharding.shard(name).numel()]",
        "test_curvature test_misuse",
    ),
]

OPTIMIZERS = [
    Defect(
        "an optimizer that takes norms of a parameter is taken for elementwise",
        "optimizers/scope.py",
        "if not flow.mixes and by_ranks(*pieces):",
        "if by_ranks(*pieces):",
        "test_optimizers::test_what_an_unknown_optimizers_update_depends_on_is_found_out",
    ),
    Defect(
        "an optimizer that couples parameters is taken for one that does not",
        "optimizers/scope.py",
        "if flow.couples or elsewhere.common != together.common or not _equal(together.moved[1:], elsewhere):",
        "if False:",
        "test_optimizers::test_what_an_unknown_optimizers_update_depends_on_is_found_out",
    ),
    Defect(
        "a wrapper's change after the step is not seen",
        "optimizers/sharded.py",
        "    wrapper.step = seen",
        "    del seen",
        "test_optimizers_of_others::test_steps_equal_one_process",
    ),
    Defect(
        "state of a client's optimizer is left behind",
        "optimizers/sharded.py",
        "_move_state(made, shard, before.pop(param))",
        "before.pop(param)",
        "test_muon::test_state_of_a_client_optimizer_comes_along test_optimizers",
    ),
    Defect(
        "all whole parameters are one rank's work",
        "optimizers/logical.py",
        "key=lambda rank: loads[rank] - (parts[rank].stop - parts[rank].start)",
        "key=lambda rank: rank",
        "test_muon",
    ),
    Defect(
        "what an owner has stepped does not reach the others",
        "optimizers/logical.py",
        "            whole.shard.copy_(part)",
        "            pass",
        "test_muon test_optimizers_of_others",
    ),
    Defect(
        "state goes on at another stage with the wrong part",
        "optimizers/state.py",
        "parts[key] = reshard(module, {name: value})[name]",
        "parts[key] = value.reshape(-1)[: len(parts)]",
        "test_optimizer_state",
    ),
]

TRAINING = [
    Defect(
        "the loss scale grows a step early",
        "training/precision.py",
        "uncounted=int(fp16.enabled),",
        "uncounted=0,",
        "test_loss_scale test_precision",
    ),
    Defect(
        "an overflow under autocast to float16 is not seen",
        "training/precision.py",
        "return config.fp16.enabled or autocast_dtype(config) == torch.float16",
        "return config.fp16.enabled",
        "test_loss_scale test_precision",
    ),
    Defect(
        "a direct backward without the loss scale is let pass",
        "training/conductor.py",
        "if needs_loss_scale(self._config) and not self.is_scaled:",
        "if False:",
        "test_misuse::test_an_unscaled_direct_backward_raises_under_float16",
    ),
    Defect(
        "a loss scaled by hand allows any number of backwards",
        "training/conductor.py",
        "torch.autograd.Variable._execution_engine.queue_callback(self._forget_scaled)",
        "pass",
        "test_misuse::test_a_loss_scaled_by_hand_allows_one_backward",
    ),
    Defect(
        "stage 1 reduces at every micro-step",
        "training/accumulation.py",
        "return (self._stage >= 2 or self.is_due) and not self.context",
        "return not self.context",
        "test_accumulation test_memory test_training",
    ),
    Defect(
        "no_sync does nothing",
        "training/accumulation.py",
        "return (self._stage >= 2 or self.is_due) and not self.context",
        "return self._stage >= 2 or self.is_due",
        "test_accumulation",
    ),
    Defect(
        "repeated batches of a rank that has run out count",
        "training/join.py",
        "self.weight = share if self.has_data else 0.0",
        "self.weight = share",
        "test_uneven::test_training_uses_the_data_there_is",
    ),
    Defect(
        "leaving a loop of join leaves its weight behind",
        "training/join.py",
        "reducer.conductor = reducer.conductor.inner",
        "pass",
        "test_uneven::test_leaving_the_loop_early_leaves_no_weight_behind",
    ),
    Defect(
        "a skipped step moves the schedule",
        "training/engine.py",
        "            if self.lr_scheduler is not None:\n                self.lr_scheduler.step(**lr_kwargs)\n",
        "        if self.lr_scheduler is not None:\n            self.lr_scheduler.step(**lr_kwargs)\n",
        "test_precision::test_a_skipped_step_does_not_move_the_schedule",
    ),
    Defect(
        "gradients are not clipped", "training/updates.py", "    if limit > 0:\n", "    if False:\n", "test_training"
    ),
]

SAVING = [
    Defect(
        "the newest checkpoints are removed, not the oldest",
        "saving/folders.py",
        "for _, path in sorted(saved, reverse=True)[number:]:",
        "for _, path in sorted(saved)[number:]:",
        "test_saving::test_a_tag_is_saved_again_and_old_ones_are_removed",
    ),
    Defect(
        "accumulated gradients are not saved",
        "saving/state.py",
        'pieces[f"gradient/{name}"] = run.piece(name, shard.grad)',
        "pass",
        "test_saving::test_accumulation_goes_on_with_other_micro_steps_where_that_comes_out_even",
    ),
    Defect(
        "a piece is stored where it does not lie",
        "saving/state.py",
        "return Piece(part.detach(), place.range(self.sharding.rank).start, place.shape)",
        "return Piece(part.detach(), 0, place.shape)",
        "test_saving",
    ),
    Defect(
        "random generators do not go on",
        "saving/state.py",
        'own = {"random": random_state(),',
        'own = {"random": None,',
        "test_saving",
    ),
    Defect(
        "names of tied weights are stored twice",
        "saving/state.py",
        "return {name: kept for name, parameter in everywhere if (kept := first[id(parameter)]) != name}",
        "return {}",
        "test_saving::test_tied_weights_are_stored_once",
    ),
    Defect(
        "shapes of another model are not compared",
        "saving/state.py",
        "if name in shapes and tuple(one.shape) != tuple(shapes[name])",
        "if False",
        "test_saving::test_another_model_is_refused_by_names_and_nothing_is_changed",
    ),
]

DEFECTS = [*PAGES, *GRADIENTS, *RANKS, *MODULE, *SPACE, *OPTIMIZERS, *TRAINING, *SAVING]
