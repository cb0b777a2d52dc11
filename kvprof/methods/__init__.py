'''What a plan is, and the methods that turn moments and weights into one.

A method of one's own is a function in a package of one's own, here ``keys_only.py``, which keeps
the same share of each key's dimensions everywhere::

    """``keys-only``: the optimal pair for the keys at one rank for all, values in full."""

    from kvprof.methods.family import CalibrationNeeds, MethodInputs, PlanFamily
    from kvprof.methods.low_rank import LayerBases, low_rank_layers, rank_targets
    from kvprof.methods.pair_bases import KEY_BASES
    from kvprof.methods.plan import Placement, Plan


    def keys_only(inputs: MethodInputs, *, smallest: int = 1) -> PlanFamily:
        """Return plans whose knob is the share of a key's dimensions that is left out."""
        moments, basis = inputs.calibrated("keys-only"), KEY_BASES["kq"]
        layers = [
            LayerBases(keys=basis(moments, facts), values=None, placement=Placement.POST_ROPE)
            for facts in inputs.layout.layers
        ]
        widths = [target.width for target in rank_targets(layers)]

        def build(knob: float) -> Plan:
            ranks = [max(smallest, round((1 - knob) * width)) for width in widths]
            plan_layers = low_rank_layers(inputs, layers, ranks)
            return Plan("keys-only", inputs.fingerprint, plan_layers, made=inputs.made)

        return PlanFamily("keys-only", "left_out", build)


    keys_only.needs = CalibrationNeeds("calibration")

registered in that package's ``pyproject.toml``::

    [project.entry-points."kvprof.methods"]
    keys-only = "keys_only:keys_only"

Then ``--method keys-only``, ``--method keys-only-4bit`` and ``--method keys-only+h2o`` work.
'''
