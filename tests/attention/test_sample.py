import dataclasses
import itertools

from attention.kernels import ALL_FORMS, pairwise_sample


def test_the_sample_of_kernel_forms_has_every_pair_of_values():
    sample, everything = (
        {pair for form in map(dataclasses.asdict, forms) for pair in itertools.combinations(form.items(), 2)}
        for forms in (pairwise_sample(), ALL_FORMS)
    )
    assert sample == everything
    assert len(pairwise_sample()) == 8
