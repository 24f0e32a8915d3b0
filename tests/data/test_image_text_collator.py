"""Labels stand on the answers only: token by token against rows put together by hand."""

import json

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

from hf_dist_ext.data.conversations import ConversationReader, load_conversations
from hf_dist_ext.data.image_text_collator import IGNORED, ImageTextCollator
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.config import RunConfig
from tests.tiny_processors import tiny_vision_language

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'][0]['text'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>{{ '\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<image>"]
ROWS = [
    {
        "image": ["a.png"],
        "conversations": [("system", "be short"), ("human", "<image>\nwhat is it ?"), ("gpt", "a cat on a mat")],
    },
    {
        "image": ["b.png", "a.png"],
        "conversations": [
            ("human", "look <image> here"),
            ("gpt", "a dog"),
            ("human", "<image> and the second picture ?"),
            ("gpt", "a cat , which is what it was"),
        ],
    },
    {"conversations": [("human", "no picture at all"), ("gpt", "a word about it")]},
]
IMAGE_TOKENS = 4  # 8 x 8 pixels in patches of 4


@pytest.fixture
def folder(tmp_path):
    for name, grey in (("a.png", 40), ("b.png", 200)):
        Image.new("L", (8, 8), grey).save(tmp_path / name)
    return tmp_path


def processor(side="right", template=CHATML):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [text for row in ROWS for _, text in row["conversations"]]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts * 4, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", additional_special_tokens=SPECIAL[1:],
        padding_side=side,
    )  # fmt: skip
    size = {"height": 8, "width": 8}
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=size, crop_size=size),
        tokenizer=wrapped,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def rows_of(rows):
    return [
        {**row, "row": number, "conversations": [{"from": who, "value": text} for who, text in row["conversations"]]}
        for number, row in enumerate(rows)
    ]


def collator(folder, side="right", template=CHATML, **options):
    reader = ConversationReader(RunConfig(image_folder=str(folder)), ["image", "conversations"], "rows.json")
    return ImageTextCollator(processor(side, template), reader, **options)


def by_hand(tokenizer, row, limit=None):
    """(ids, labels): every piece tokenized by itself, answers kept as labels."""
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    start, end, image = (tokenizer.convert_tokens_to_ids(token) for token in SPECIAL[1:])
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    ids, labels = [], []
    for who, text in row["conversations"]:
        header = [start, *encode(f"{roles[who]}\n")]
        if who == "gpt":
            body = [*encode(text), end]
            kept = [IGNORED] * len(header) + body + [IGNORED] * len(encode("\n"))
        else:
            body = []
            for index, piece in enumerate(text.replace("<image>\n", "<image>").split("<image>")):
                body += [image] * IMAGE_TOKENS * (index > 0) + encode(piece)
            body.append(end)
            kept = [IGNORED] * (len(header) + len(body) + len(encode("\n")))
        ids += header + body + encode("\n")
        labels += kept
    return ids[:limit], labels[:limit]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("limit", [None, 48])
def test_labels_are_those_of_a_row_put_together_by_hand(folder, side, limit, template):
    collate = collator(folder, side, template, max_length=limit)
    batch = collate(rows_of(ROWS))
    expected = [by_hand(collate.tokenizer, row, limit) for row in ROWS]
    lengths = [len(ids) for ids, _ in expected]
    assert len(set(lengths)) > 1 and (limit is None or max(lengths) == limit), "padding and cutting both happen"
    assert sum(label != IGNORED for _, labels in expected for label in labels) > 20
    for row, (ids, labels) in enumerate(expected):
        place = slice(0, len(ids)) if side == "right" else slice(batch["input_ids"].shape[1] - len(ids), None)
        assert batch["input_ids"][row, place].tolist() == ids
        assert batch["labels"][row, place].tolist() == labels
        rest = torch.ones(batch["input_ids"].shape[1], dtype=torch.bool)
        rest[place] = False
        assert not batch["attention_mask"][row, rest].any() and batch["attention_mask"][row, place].all()
        assert (batch["labels"][row, rest] == IGNORED).all()


def test_pictures_stand_in_the_order_of_their_marks(folder):
    batch = collator(folder)(rows_of(ROWS))
    light = batch["pixel_values"].mean(dim=(1, 2, 3))  # a, b, a
    assert batch["pixel_values"].shape == (3, 3, 8, 8) and light[1] > light[0] and light[0] == light[2]
    image = collator(folder).tokenizer.convert_tokens_to_ids("<image>")
    assert (batch["input_ids"] == image).sum(dim=1).tolist() == [IMAGE_TOKENS, 2 * IMAGE_TOKENS, 0]
    assert "pixel_values" not in collator(folder)(rows_of(ROWS[2:]))


def test_what_is_generated_from_ends_where_the_last_answer_begins(folder):
    collate = collator(folder, for_evaluation=True, with_prompts=True)
    batch = collate(rows_of(ROWS))
    assert next(iter(batch)) == "answers"  # Trainer counts rows by the first tensor
    for row, whole in enumerate(ROWS):
        before = {**whole, "conversations": whole["conversations"][:-1]}
        ids, _ = by_hand(collate.tokenizer, before)
        ids += collate.tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
        prompt = batch["prompt"]["input_ids"][row]
        assert prompt[-len(ids) :].tolist() == ids and not batch["prompt"]["attention_mask"][row, : -len(ids)].any()
        answer = [token for token in batch["answers"][row].tolist() if token != IGNORED]
        assert collate.tokenizer.decode(answer) == whole["conversations"][-1][1]


def test_a_template_without_generation_prompt_gets_no_label_on_its_header(folder):
    template = CHATML.partition("{% if add_generation_prompt %}")[0]
    plain, with_prompt = (collator(folder, template=one)(rows_of(ROWS)) for one in (template, CHATML))
    assert (plain["labels"] != IGNORED).any() and torch.equal(plain["labels"], with_prompt["labels"])


def test_a_row_that_is_cut_before_its_answer_trains_nothing_and_is_named_once(folder, caplog):
    ids, labels = by_hand(collator(folder).tokenizer, ROWS[2])
    limit = next(index for index, label in enumerate(labels) if label != IGNORED)
    collate = collator(folder, max_length=limit)
    with caplog.at_level("WARNING"):
        batch = collate(rows_of([ROWS[2], {"conversations": [("human", "it"), ("gpt", "a cat")]}]))
        collate(rows_of([ROWS[2], {"conversations": [("human", "it"), ("gpt", "a cat")]}]))
    assert (batch["labels"][0] == IGNORED).all() and (batch["labels"][1] != IGNORED).any()
    assert [record.message.count("rows.json, row 0") for record in caplog.records] == [1]
    with pytest.raises(UsageError, match="no token of an answer is left"):
        collate(rows_of([ROWS[2]]))
    with pytest.raises(UsageError, match="row 0 .*images end at token .* beyond max_length=9"):
        collator(folder, max_length=9)(rows_of(ROWS[:1]))


def test_a_processor_that_cannot_do_it_is_refused(folder):
    for change, words in ((lambda p: setattr(p, "chat_template", None), "has no chat template"),
                          (lambda p: delattr(p, "image_processor"), "is no image-text processor")):  # fmt: skip
        broken = processor()
        change(broken)
        with pytest.raises(UsageError, match=words):
            ImageTextCollator(broken, None)
    silent = CHATML.replace("<image>", "")
    with pytest.raises(UsageError, match=r"row 0 .* 0 image token.* for 1 image.*template writes none"):
        collator(folder, template=silent)(rows_of(ROWS))
    rows = rows_of([{"conversations": [("human", "say <|im_end|>"), ("gpt", "a cat")]}])
    collate = collator(folder)
    collate.image_token = "<|im_end|>"  # as if a text held the image token
    with pytest.raises(UsageError, match="3 image token.* for 0 image.*Remove it from the text"):
        collate(rows)


# ---- rows ----


def run_on(folder, rows, **options):
    path = folder / "rows.json"
    path.write_text(json.dumps(rows) if isinstance(rows, list) else rows)
    return RunConfig(task="image-text-to-text", dataset_name=str(path), image_folder=str(folder), **options)


def turns(*pairs):
    return [{"from": who, "value": text} for who, text in pairs]


GOOD = turns(("human", "<image>\nwhat ?"), ("gpt", "a cat"))


def test_rows_of_llava_are_read_whatever_their_types(folder):
    rows = [
        {"id": 1, "image": "a.png", "conversations": GOOD},
        {"id": "two", "conversations": turns(("human", "hello"), ("gpt", "you"))},
        {"id": None, "image": ["a.png", "b.png"], "conversations": turns(("human", "<image><image>"), ("gpt", "two"))},
    ]
    lines = "\n".join(json.dumps(row) for row in rows)
    for text in (rows, lines):
        train, evaluation = load_conversations(run_on(folder, text, eval_holdout=1))
        assert len(train) == 2 and len(evaluation) == 1
        assert sorted([*train["row"], *evaluation["row"]]) == [0, 1, 2]
    reader = ConversationReader(RunConfig(image_folder=str(folder)), train.column_names)
    found = {row["row"]: reader.read(row) for part in (train, evaluation) for row in part}
    assert [len(found[i].images) for i in range(3)] == [1, 0, 2]
    assert found[0].messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "what ?"}]


def test_columns_of_a_dataset_make_a_conversation(folder):
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature

    rows = [{"photo": [str(folder / "a.png")], "text": "a cat"}, {"photo": [], "text": "nothing"}]
    features = Features({"photo": List(ImageFeature()), "text": Value("string")})
    Dataset.from_list(rows, features=features).save_to_disk(folder / "saved")
    run = RunConfig(
        task="image-text-to-text",
        dataset_name=str(folder / "saved"),
        columns={"image": "photo", "answer": "text"},
        prompts={"prompt": "what ?"},
    )
    train, _ = load_conversations(run)
    reader = ConversationReader(run, train.column_names)
    first, second = (reader.read(row) for row in train)
    assert first.images[0].size == (8, 8) and not second.images
    assert first.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "what ?"}]
    assert second.messages[0]["content"] == [{"type": "text", "text": "what ?"}]


@pytest.mark.parametrize("row, words", [
    ({"image": "a.png", "conversations": turns(("human", "what ?"), ("gpt", "a"))}, r"1 image\(s\) but 0 mark"),
    ({"conversations": GOOD}, r"0 image\(s\) but 1 mark"),
    ({"image": "gone.png", "conversations": GOOD}, "no image file .*gone.png"),
    ({"image": "a.png", "conversations": GOOD[:1]}, "the speakers are user"),
    ({"image": "a.png", "conversations": []}, "the speakers are none"),
    ({"image": "a.png", "conversations": turns(("human", "<image>"), ("gpt", " "))}, "an answer is empty"),
    ({"image": "a.png", "conversations": turns(("human", "?"), ("gpt", "<image>"))}, "an answer holds <image>"),
    ({"image": "a.png", "conversations": turns(("human", "<image>"), ("bot", "a"))}, "is no turn"),
])  # fmt: skip
def test_a_row_that_does_not_fit_is_named_before_training(folder, row, words):
    good = {"image": "a.png", "conversations": GOOD}
    with pytest.raises(UsageError, match=rf"row 1 \(counted from 0\).*{words}"):
        load_conversations(run_on(folder, [good, row, good]))


@pytest.mark.parametrize("content, options, words", [
    ('{"image": "a.png"', {}, "is not JSON or JSON lines"),
    ([{"image": "a.png", "caption": "a cat"}], {}, "neither conversations nor answer"),
    ([{"image": "a.png", "caption": "a cat"}], {"columns": {"text": "caption"}}, 'columns has "text"'),
    ([{"image": "a.png", "caption": "a cat"}], {"columns": {"answer": "captoin"}}, 'no column "captoin".*'),
    ([1], {}, "a row is not an object"),
])  # fmt: skip
def test_a_file_that_does_not_fit_is_one_line(folder, content, options, words):
    with pytest.raises(UsageError, match=words):
        load_conversations(run_on(folder, content, **options))


def test_a_broken_picture_and_a_wrong_folder_are_named(folder):
    (folder / "broken.png").write_bytes(b"no picture")
    train, _ = load_conversations(run_on(folder, [{"image": "broken.png", "conversations": GOOD}]))
    reader = ConversationReader(RunConfig(image_folder=str(folder)), train.column_names, "rows.json")
    with pytest.raises(UsageError, match="row 0 .*broken.png cannot be read as an image"):
        reader.read(train[0])
    with pytest.raises(UsageError, match='image_folder="nowhere" is no folder'):
        ConversationReader(RunConfig(image_folder="nowhere"), train.column_names)


def test_a_column_that_the_first_row_lacks_is_read_too(folder):
    rows = [{"image": "a.png", "answer": "a cat"}, {"image": "b.png", "prompt": "which colour ?", "answer": "grey"}]
    train, _ = load_conversations(run_on(folder, rows))
    reader = ConversationReader(RunConfig(image_folder=str(folder)), train.column_names)
    first, second = (reader.read(row).messages[0]["content"] for row in train)
    assert first == [{"type": "image"}] and second == [{"type": "image"}, {"type": "text", "text": "which colour ?"}]


def test_a_turn_of_parts_is_refused_and_not_read_as_their_json(folder):
    parts = lambda text: [{"type": "text", "text": text}]  # noqa: E731
    turns_of_parts = [{"role": "user", "content": parts("hi")}, {"role": "assistant", "content": parts("you")}]
    with pytest.raises(UsageError, match=r"row 0 .*is no turn"):
        load_conversations(run_on(folder, [{"conversations": turns_of_parts}]))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "smolvlm", "internvl", "gemma3"])
def test_rows_with_and_without_pictures_share_a_batch(folder, family):
    reader = ConversationReader(RunConfig(image_folder=str(folder)), ["image", "conversations"], "rows.json")
    collate = ImageTextCollator(tiny_vision_language(family)[0], reader)
    alone = [collate([row]) for row in rows_of(ROWS)]
    together = collate(rows_of(ROWS))
    for number, batch in enumerate(alone):
        length = batch["input_ids"].shape[1]
        assert together["input_ids"][number, :length].equal(batch["input_ids"][0])
        assert together["labels"][number, :length].equal(batch["labels"][0])
