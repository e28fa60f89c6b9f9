"""Small archives in the layouts of the real archives, and hostile archives."""

import contextlib
import gzip
import io
import json
import tarfile


def write_tar(path, files, links=(), mode="w:gz"):
  """Writes a tar archive, whose bytes do not depend on the time.

  Args:
    path: archive to write.
    files: {name: bytes}.
    links: (name, target, type of tarfile) of each link.
    mode: mode of `tarfile.open`.
  """
  # A fixed mtime: gzip would write the current second into its header.
  packed = gzip.GzipFile(path, "wb", mtime=0) if mode == "w:gz" else None
  with (
    packed or contextlib.nullcontext(),
    tarfile.open(path, "w" if packed else mode, fileobj=packed) as tar,
  ):
    for name, content in files.items():
      member = tarfile.TarInfo(name)
      member.size = len(content)
      tar.addfile(member, io.BytesIO(content))
    for name, target, kind in links:
      member = tarfile.TarInfo(name)
      member.type, member.linkname = kind, target
      tar.addfile(member)
  return path


def write_folder(path, files):
  for name, content in files.items():
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(content)
  return path


def imdb(count, note="read me"):
  """Returns reviews as {name: bytes}, with other files among them."""
  files = {"aclImdb/README": note.encode()}
  files["aclImdb/train/unsup/0_0.txt"] = b"no label"
  for split in ("train", "test"):
    for label in ("neg", "pos"):
      for i in range(count):
        name = f"aclImdb/{split}/{label}/{i}_1.txt"
        files[name] = f"{split} {label} {i} \u00e9".encode()
  return files


def aan(counts):
  """Returns LRA's pairs, whose texts have quotes and carriage returns."""
  names = {"train": "train", "validation": "eval", "test": "test"}
  return {
    f"lra_release/tsv_data/new_aan_pairs.{names[split]}.tsv": b"".join(
      f'{i % 2}.0\ta{i}\tb{i}\t"{split} {i}\r one\tand two {i}\n'.encode()
      for i in range(count)
    )
    for split, count in counts.items()
  }


def ag_news(counts):
  """Returns {train,test}.csv with `counts` articles of each class."""
  return {
    f"ag_news_csv/{split}.csv": "".join(
      f'"{k}","{split} title {i}","a ""quoted"" text, {k}"\n'
      for i in range(count)
      for k in (1, 2, 3, 4)
    ).encode()
    for split, count in counts.items()
  }


def squad(counts):
  """Returns SQuAD's files of `counts` paragraphs, with four questions each."""
  names, cities = (
    ("Ada", "Bob", "Cleo", "Dan"),
    ("Rome", "Oslo", "Lima", "Bern"),
  )

  def paragraph(split, i):
    facts = [(name, cities[(i + k) % 4]) for k, name in enumerate(names)]
    context = " ".join(f"The {n} lives in {c}, \u00e9 {i}." for n, c in facts)
    questions = []
    for name, city in facts:
      start = context.index(city, context.index(name))
      answers = [{"answer_start": start, "text": city}]
      if split == "dev":
        answers += [{"answer_start": start - 3, "text": f"in {city}"}]
      questions.append(
        {"id": f"{split}-{i}-{name}", "question": f" Where is {name}?"}
        | {"answers": answers}
      )
    return {"context": context, "qas": questions}

  return {
    f"{split}-v1.1.json": json.dumps(
      {
        "version": "1.1",
        "data": [
          {"title": "t", "paragraphs": [paragraph(split, i)]} for i in range(n)
        ],
      }
    ).encode()
    for split, n in counts.items()
  }


def simcse(count, pairs=4):
  """Returns sentences, and pairs of STS-12 and STS-B in SentEval's files."""
  words = ("red", "blue", "green", "house", "tree", "river", "is", "was")

  def sentence(k):
    return " ".join(words[(k * m + m) % 8] for m in range(1, 6))

  files = {
    "wiki1m_for_simcse.txt": "".join(f"{sentence(k)}\n" for k in range(count))
  }
  subsets = (
    "MSRpar",
    "MSRvid",
    "SMTeuroparl",
    "surprise.OnWN",
    "surprise.SMTnews",
  )
  for s, subset in enumerate(subsets):
    ks = range(s, s + pairs)
    inputs = "".join(f"{sentence(k)}\t{sentence(k * 2)}\n" for k in ks)
    # The last line is empty: a pair without a score does not count.
    scores = "".join(f"{k % 6}.{k % 3}00\n" for k in ks[1:]) + "\n"
    files[f"STS/STS12-en-test/STS.input.{subset}.txt"] = inputs
    files[f"STS/STS12-en-test/STS.gs.{subset}.txt"] = scores
  files["STS/STS13-en-test/STS.input.surprise.OnWN.txt"] = "another\tyear\n"
  files["STS/STSBenchmark/sts-dev.csv"] = "".join(
    f"news\tfile\t2012\t{k:04d}\t{k % 6}.5\t{sentence(k)}\t{sentence(k + 1)}\n"
    for k in range(6)
  )
  return {name: content.encode() for name, content in files.items()}
