"""Arithmetic worked out by hand, for one product after the other and for the paper's shapes."""

import pytest

from tf_teaforn.flops import training_flops

SIZES = {"num_layers": 16, "hidden_dim": 1024, "intermediate_dim": 4096, "vocabulary_size": 96103}


@pytest.mark.parametrize(
    ("source_length", "target_length", "shared", "ratios"),
    [
        (512, 256, True, (1.416, 1.832)),
        (1024, 128, True, (1.147, 1.295)),
        # Keys and values of the encoder's outputs computed at every stage.
        (512, 256, False, (1.494, 1.988)),
        (1024, 128, False, (1.254, 1.508)),
    ],
)
def test_ratios_at_the_shapes_of_the_paper(source_length, target_length, shared, ratios):
    one, *more = (
        training_flops(
            batch_size=4,
            source_length=source_length,
            target_length=target_length,
            n=n,
            shared=shared,
            **SIZES,
        )
        for n in (1, 2, 3)
    )
    assert [flops / one for flops in more] == pytest.approx(ratios, abs=1e-3)


def test_a_model_of_one_layer_product_by_product():
    batch, source, target, vocabulary, width, inner, stages = 2, 3, 5, 11, 4, 6, 3
    rows, columns = batch * source, batch * target
    products = [
        *[(rows, width, width)] * 4,  # encoder: query, key, value, output
        *[(rows, source, width)] * 2,  # scores, weighted sum
        (rows, width, inner),
        (rows, inner, width),
        *[(rows, width, width)] * 2,  # keys and values of the encoder's outputs
        *[
            *[(columns, width, width)] * 4,
            *[(columns, target, width)] * 2,
            *[(columns, width, width)] * 2,  # attention to the encoder: query, output
            *[(columns, source, width)] * 2,
            (columns, width, inner),
            (columns, inner, width),
            (columns, width, vocabulary),
        ]
        * stages,
    ]
    expected = 3 * sum(2 * a * b * c for a, b, c in products)
    assert expected == training_flops(
        batch_size=batch,
        source_length=source,
        target_length=target,
        vocabulary_size=vocabulary,
        num_layers=1,
        hidden_dim=width,
        intermediate_dim=inner,
        n=stages,
    )
