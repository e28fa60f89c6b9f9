"""Small archives of the layouts of the real ones, and hostile ones."""

import contextlib
import gzip
import io
import tarfile


def write_tar(path, files, links=(), mode="w:gz"):
  """files: {name: bytes}; links: (name, target, type of tarfile).

  The same bytes at any time: gzip would write the second into its header.
  """
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
  """Reviews as {name: bytes}, with strangers among them."""
  files = {"aclImdb/README": note.encode()}
  files["aclImdb/train/unsup/0_0.txt"] = b"no label"
  for split in ("train", "test"):
    for label in ("neg", "pos"):
      for i in range(count):
        name = f"aclImdb/{split}/{label}/{i}_1.txt"
        files[name] = f"{split} {label} {i} \u00e9".encode()
  return files


def aan(counts):
  """LRA's pairs; quotes and carriage returns are part of the texts."""
  names = {"train": "train", "validation": "eval", "test": "test"}
  return {
    f"lra_release/tsv_data/new_aan_pairs.{names[split]}.tsv": b"".join(
      f'{i % 2}.0\ta{i}\tb{i}\t"{split} {i}\r one\tand two {i}\n'.encode()
      for i in range(count)
    )
    for split, count in counts.items()
  }


def ag_news(counts):
  """{train,test}.csv with `count` articles of each class."""
  return {
    f"ag_news_csv/{split}.csv": "".join(
      f'"{k}","{split} title {i}","a ""quoted"" text, {k}"\n'
      for i in range(count)
      for k in (1, 2, 3, 4)
    ).encode()
    for split, count in counts.items()
  }
