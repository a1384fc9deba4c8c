"""Links from annotations to torch: autodoc knows where a name is defined, and inventories where it is exported."""

from sphinx.ext.intersphinx import missing_reference

EXPORTED_AS = {
    "torch._C.Generator": "torch.Generator",
    "torch.distributed.distributed_c10d.ProcessGroup": "torch.distributed.ProcessGroup",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
    "torch.utils.data.dataset.Dataset": "torch.utils.data.Dataset",
    "torch.utils.data.dataset.Subset": "torch.utils.data.Subset",
    "Path": "pathlib.Path",
}


def resolve(app, env, node, contnode):
    """Called by Sphinx for a name that is not of this guide."""
    if node.get("reftarget") not in EXPORTED_AS:
        return None
    node["reftarget"] = EXPORTED_AS[node["reftarget"]]
    return missing_reference(app, env, node, contnode)


def setup(app):
    """Before intersphinx itself."""
    app.connect("missing-reference", resolve, priority=400)
    return {"parallel_read_safe": True}
