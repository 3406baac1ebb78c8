//! Archives of images, right and wrong ones.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use backhand::compression::Compressor;
use backhand::{FilesystemCompressor, FilesystemWriter, NodeHeader};
use serde_json::json;
use tar::{Builder, EntryType, Header};
use tempfile::TempDir;

use super::digest::digest_of;
use super::*;

/// A tar in memory.
struct Layer(Builder<Vec<u8>>);

impl Layer {
    fn new() -> Self {
        Self(Builder::new(Vec::new()))
    }

    /// Adds an entry whose names are written as they are, right or wrong.
    fn with(mut self, kind: EntryType, path: &str, link: &str, content: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        header.set_mode(0o4750);
        header.set_mtime(1_000);
        let old = header.as_old_mut();
        old.name[..path.len()].copy_from_slice(path.as_bytes());
        old.linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_cksum();
        self.0.append(&header, content).expect("an entry");
        self
    }

    fn file(self, path: &str, content: &str) -> Self {
        self.with(EntryType::Regular, path, "", content.as_bytes())
    }

    fn directory(self, path: &str) -> Self {
        self.with(EntryType::Directory, path, "", b"")
    }

    fn finish(self) -> Vec<u8> {
        self.0.into_inner().expect("a tar")
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(bytes).expect("bytes");
    packed.finish().expect("bytes")
}

/// An OCI layout of layers, each with what it is packed as.
fn oci_archive(layers: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
    let mut archive = Layer::new();
    let mut add = |bytes: &[u8]| {
        let digest = digest_of(bytes);
        let path = format!("blobs/sha256/{}", digest.digits());
        let whole = std::mem::replace(&mut archive, Layer::new());
        archive = whole.with(EntryType::Regular, &path, "", bytes);
        digest.to_string()
    };
    let packed: Vec<_> = layers
        .iter()
        .map(|(_, packed)| json!({"mediaType": "layer", "digest": add(packed), "size": 0}))
        .collect();
    let contents = layers.iter().map(|(plain, _)| digest_of(plain).to_string());
    let config = json!({
        "config": {"Env": ["PATH=/opt/bin:/bin", "LANG=C"]},
        "rootfs": {"type": "layers", "diff_ids": contents.collect::<Vec<_>>()},
    });
    let config = add(config.to_string().as_bytes());
    let manifest = json!({
        "config": {"mediaType": "config", "digest": config},
        "layers": packed,
    });
    let manifest = add(manifest.to_string().as_bytes());
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        _ => "arm64",
    };
    let index = json!({"manifests": [
        {"digest": format!("sha256:{}", "0".repeat(64)),
         "platform": {"os": "windows", "architecture": "amd64"}},
        {"digest": manifest, "platform": {"os": "linux", "architecture": architecture}},
    ]});
    archive
        .file("oci-layout", "{\"imageLayoutVersion\": \"1.0.0\"}")
        .file("index.json", &index.to_string())
        .finish()
}

struct Import {
    directory: TempDir,
}

impl Import {
    fn new(archive: &[u8]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join("archive"), archive).expect("an archive");
        fs::create_dir(directory.path().join("home")).expect("a home");
        Self { directory }
    }

    fn target(&self) -> PathBuf {
        self.directory.path().join("home/image")
    }

    fn run(&self, replace: bool) -> Result<()> {
        let args = ImportImageArgs {
            archive: self.directory.path().join("archive"),
            directory: self.target(),
            replace,
        };
        import_image(&args, Printer::new(true))
    }

    /// The error of an archive that leaves nothing behind.
    #[track_caller]
    fn expect_refusal(&self) -> String {
        let error = self.run(false).expect_err("it is refused");
        let left = fs::read_dir(self.directory.path().join("home")).expect("the home");
        assert_eq!(left.count(), 0, "nothing is left");
        format!("{error:#}")
    }
}

fn plain(layer: Vec<u8>) -> (Vec<u8>, Vec<u8>) {
    (layer.clone(), layer)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn layers_are_unpacked_over_each_other() {
    let first = Layer::new()
        .directory("usr/bin/")
        .with(EntryType::Symlink, "bin", "usr/bin", b"")
        .file("bin/tool", "one")
        .with(EntryType::Link, "usr/bin/other", "usr/bin/tool", b"")
        .file("etc/gone", "x")
        .file("etc/kept", "x")
        .file("opaque/old", "x")
        .file("opaque/deep/old", "x")
        .with(EntryType::Char, "dev/null", "", b"")
        .finish();
    let second = Layer::new()
        .file("usr/bin/tool", "two")
        .file("etc/.wh.gone", "")
        .file("opaque/new", "n")
        .file("opaque/.wh..wh..opq", "")
        .finish();
    let third = Layer::new().file("last", "3").finish();
    let packed = zstd::encode_all(&third[..], 1).expect("it is packed");
    let layers = [
        plain(first),
        (second.clone(), gzip(&second)),
        (third, packed),
    ];
    for archive in [oci_archive(&layers), gzip(&oci_archive(&layers))] {
        let import = Import::new(&archive);
        import.run(false).expect("an image");
        let root = import.target();
        assert_eq!(read(&root.join("usr/bin/tool")), "two");
        assert_eq!(
            read(&root.join("usr/bin/other")),
            "one",
            "a link to the old one"
        );
        assert!(!root.join("etc/gone").exists() && root.join("etc/kept").exists());
        assert!(!root.join("opaque/old").exists() && !root.join("opaque/deep").exists());
        assert_eq!(read(&root.join("opaque/new")), "n");
        assert_eq!(read(&root.join("last")), "3");
        let tool = root.join("usr/bin/tool").metadata().expect("a file");
        assert_eq!((tool.mode() & 0o7777, tool.mtime()), (0o750, 1_000));
        let tmp = root.join("tmp").metadata().expect("a mount point");
        assert_eq!(tmp.permissions().mode() & 0o7777, 0o1777);
        assert!(root.join("etc/resolv.conf").exists());
        let described: ImageDescription =
            serde_json::from_str(&read(&root.join(IMAGE_DESCRIPTION_FILE))).expect("JSON");
        assert_eq!(described.environment[0].1, "/opt/bin:/bin");
    }
}

#[test]
fn images_replace_others_only_on_request() {
    let archive = |text: &str| oci_archive(&[plain(Layer::new().file("text", text).finish())]);
    let import = Import::new(&archive("old"));
    import.run(false).expect("an image");
    fs::write(import.directory.path().join("archive"), archive("new")).expect("an archive");
    let refused = import.run(false).expect_err("it exists").to_string();
    assert!(refused.contains("--replace"), "{refused}");
    assert_eq!(read(&import.target().join("text")), "old");
    import.run(true).expect("an image");
    assert_eq!(read(&import.target().join("text")), "new");
    let left = fs::read_dir(import.directory.path().join("home")).expect("the home");
    assert_eq!(left.count(), 1);
}

#[test]
fn images_never_replace_other_data() {
    let import = Import::new(&oci_archive(&[plain(
        Layer::new().file("text", "new").finish(),
    )]));
    fs::create_dir(import.target()).expect("a directory");
    fs::write(import.target().join("thesis"), "years").expect("a file");
    let refused = import.run(true).expect_err("it is no image").to_string();
    assert!(refused.contains("holds no image"), "{refused}");
    assert_eq!(read(&import.target().join("thesis")), "years");
    fs::remove_file(import.target().join("thesis")).expect("it was there");
    import.run(true).expect("an empty directory is replaced");
}

#[test]
fn escapes_are_refused() {
    for (layer, says) in [
        (Layer::new().file("../evil", "x"), "'..'"),
        (Layer::new().file("/etc/evil", "x"), "absolute"),
        (Layer::new().file("a/../../evil", "x"), "'..'"),
        (
            Layer::new().with(EntryType::Link, "evil", "../../archive", b""),
            "'..'",
        ),
        (
            Layer::new().with(EntryType::Link, "evil", "/etc/passwd", b""),
            "absolute",
        ),
        (
            Layer::new()
                .with(EntryType::Symlink, "out", "../..", b"")
                .with(EntryType::Symlink, "loop", "loop", b"")
                .file("loop/evil", "x"),
            "loop",
        ),
    ] {
        let import = Import::new(&oci_archive(&[plain(layer.finish())]));
        let told = import.expect_refusal();
        assert!(told.contains(says), "{told}");
    }
    // A link leads into the image, however many levels it names.
    let layer = Layer::new()
        .with(EntryType::Symlink, "out", "../../..", b"")
        .file("out/evil", "x");
    let import = Import::new(&oci_archive(&[plain(layer.finish())]));
    import.run(false).expect("an image");
    assert!(import.target().join("evil").exists());
    assert!(!import.directory.path().join("evil").exists());
}

#[test]
fn wrong_digests_are_refused() {
    let layer = Layer::new().file("text", "right").finish();
    let mut archive = oci_archive(&[plain(layer.clone())]);
    let at = archive
        .windows(5)
        .position(|window| window == b"right")
        .expect("its content");
    archive[at..at + 5].copy_from_slice(b"wrong");
    let told = Import::new(&archive).expect_refusal();
    assert!(told.contains("sha256:"), "{told}");

    // The archive's digest is right, and that of its content is not.
    let other = Layer::new().file("text", "other").finish();
    let archive = oci_archive(&[(other, gzip(&layer))]);
    let told = Import::new(&archive).expect_refusal();
    assert!(told.contains("has other content"), "{told}");

    let mut archive = oci_archive(&[plain(layer)]);
    archive.truncate(archive.len() / 2);
    Import::new(&archive).expect_refusal();
    let told = Import::new(b"no archive at all").expect_refusal();
    assert!(told.contains("cannot import"), "{told}");
    let told = Import::new(&Layer::new().file("x", "y").finish()).expect_refusal();
    assert!(told.contains("docker save"), "{told}");
}

#[test]
fn squashfs_is_unpacked() {
    let header = NodeHeader::new(0o755, 0, 0, 77);
    let mut image = FilesystemWriter::default();
    let compressor = FilesystemCompressor::new(Compressor::Gzip, None).expect("gzip");
    image.set_compressor(compressor);
    image.push_dir("bin", header).expect("a directory");
    let tool = std::io::Cursor::new(b"tool".to_vec());
    image.push_file(tool, "bin/tool", header).expect("a file");
    image
        .push_symlink("bin/tool", "link", header)
        .expect("a link");
    let mut bytes = std::io::Cursor::new(Vec::new());
    image.write(&mut bytes).expect("a squashfs");
    let import = Import::new(bytes.get_ref());
    import.run(false).expect("an image");
    assert_eq!(read(&import.target().join("link")), "tool");
    let tool = import.target().join("bin/tool").metadata().expect("a file");
    assert_eq!((tool.mode() & 0o777, tool.mtime()), (0o755, 77));
    let mut damaged = bytes.into_inner();
    damaged.truncate(100);
    Import::new(&damaged).expect_refusal();
}
