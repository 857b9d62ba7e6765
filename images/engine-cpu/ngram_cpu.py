"""Speculation by NGRAM on a CPU: SGLang's kernels for it, in plain PyTorch.

The CUDA package sgl_kernel has them compiled. Each function here writes the same values into the same arguments; a
test compares answers with and without drafts. Drafts form a tree: node 0 of a request is the last accepted token, and
`mask[i, j]` says that node j is node i or one of its ancestors. Slow, and good for a tiny model. What other methods of
speculation need is not here.
"""

import ctypes
import functools
import sys
import types

import torch


def install(sgl_kernel):
    """Adds the kernels to the stand-in of sgl_kernel."""
    for kernel in (
        assign_req_to_token_pool_cpu,
        assign_extend_cache_locs_cpu,
        verify_tree_greedy_cpu,
        fill_accept_out_cache_loc_cpu,
        copy_all_layer_kv_cache_cpu,
    ):
        setattr(sgl_kernel, kernel.__name__, kernel)
    speculative = types.ModuleType("sgl_kernel.speculative")
    speculative.reconstruct_indices_from_tree_mask = reconstruct_indices_from_tree_mask
    sgl_kernel.__path__ = []  # a package, so that its one module can be imported
    sgl_kernel.speculative = sys.modules["sgl_kernel.speculative"] = speculative


def reconstruct_indices_from_tree_mask(
    tree_mask, verified_seq_len, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling, batch_size, n
):
    """Writes each node's position, index, first child and next sibling (-1: none; a root has no sibling)."""
    _attend_to_drafts()  # the first kernel of a step with drafts: the attention back end is there by now
    masks = tree_mask.reshape(-1)[: batch_size * n * n].view(batch_size, n, n).tolist()
    place, child, sibling = [], [], []
    for mask, length in zip(masks, verified_seq_len.tolist(), strict=True):
        ancestors = [[j for j in range(i) if mask[i][j]] for i in range(n)]
        parent = [max(above, default=-1) for above in ancestors]
        place += [length + len(above) for above in ancestors]
        child += [next((k for k in range(i + 1, n) if mask[k][i]), -1) for i in range(n)]
        sibling += [
            next((k for k in range(i + 1, n) if parent[i] >= 0 and parent[k] == parent[i]), -1) for i in range(n)
        ]
    for out, values in (
        (positions, place),
        (retrieve_index, range(batch_size * n)),
        (retrieve_next_token, child),
        (retrieve_next_sibling, sibling),
    ):
        out.copy_(torch.tensor(values).view_as(out))


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
):  # fmt: skip
    """Walks from the root to the child that the model would have chosen, as long as there is one.

    `accept_index` gets the nodes of that path, `predicts` the model's choice after each of them, and
    `accept_token_num` their number without the root."""
    target = target_predict.reshape(-1)
    for b in range(candidates.shape[0]):
        last, node, accepted = int(retrive_index[b, 0]), 0, 0
        accept_index[b, 0] = last
        while accepted + 1 < accept_index.shape[1]:
            node = int(retrive_next_token[b, node])
            while node != -1 and candidates[b, node] != target[last]:
                node = int(retrive_next_sibling[b, node])
            if node == -1:
                break
            predicts[last] = target[last]
            accepted, last = accepted + 1, int(retrive_index[b, node])
            accept_index[b, accepted] = last
        predicts[last] = target[last]
        accept_token_num[b] = accepted


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, _row_length):
    """Writes the new slots of the KV cache, request after request, into the requests' rows."""
    done = 0
    for row, first, after in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:after] = out_cache_loc[done : done + after - first].to(req_to_token.dtype)
        done += after - first


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, _row_length):
    """The other way: reads these slots out of the requests' rows."""
    done = 0
    for row, first, after in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        out_cache_loc[done : done + after - first] = req_to_token[row, first:after].to(out_cache_loc.dtype)
        done += after - first


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """Packs the slots of the accepted nodes to the front."""
    accepted = accept_index.reshape(-1)
    slots = out_cache_loc[accepted[accepted > -1].long()]
    accept_out_cache_loc[: slots.numel()] = slots


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Copies slots of the KV cache in each layer's buffer, given by its address and the bytes of a slot. All are read
    before one is written, because targets and sources overlap."""
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(address + source * size, size) for source in src_loc.tolist()]
        for target, slot in zip(tgt_loc.tolist(), slots, strict=True):
            ctypes.memmove(address + target * size, slot, size)


@functools.cache
def _attend_to_drafts():
    """Teaches the torch_native attention to check drafts. It takes them for a prompt, and a prompt's lengths are not
    there then."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    of_prompts = TorchNativeAttnBackend.forward_extend

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if not forward_batch.forward_mode.is_target_verify():
            return of_prompts(self, q, k, v, layer, forward_batch, save_kv_cache)
        if layer.is_cross_attention or self.use_sliding_window_kv_pool or (layer.sliding_window_size or -1) > -1:
            raise NotImplementedError("drafts are checked with full attention only")
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        n = forward_batch.spec_info.draft_token_num
        masks = forward_batch.spec_info.custom_mask.view(-1, n, n)
        queries = q.view(-1, n, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty((queries.shape[0], n, layer.tp_q_head_num, layer.v_head_dim))
        rows = forward_batch.req_pool_indices.tolist()
        for b, (row, length) in enumerate(zip(rows, forward_batch.seq_lens.tolist(), strict=True)):
            slots = self.req_to_token_pool.req_to_token[row, : length + n]
            # Each node sees all that was accepted, its ancestors and itself.
            seen = torch.cat((torch.ones((n, length), dtype=torch.bool), masks[b].bool()), dim=1)
            out[b] = torch.nn.functional.scaled_dot_product_attention(
                queries[b].movedim(0, 1)[None],
                keys[slots].to(q.dtype).movedim(0, 1)[None],
                values[slots].to(q.dtype).movedim(0, 1)[None],
                attn_mask=seen,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )[0].movedim(0, 1)
        return out.view(q.shape[0], -1)

    TorchNativeAttnBackend.forward_extend = forward_extend
