//! Archives of container images: an OCI image layout in a tar, and what `docker save` writes. Each
//! part that is used has a digest, which is compared.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail};
use bafs_proto::image::ImageDescription;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tar::Archive;

use super::decompress;
use super::digest::{HashingReader, ImageDigest, digest_of};
use super::layer::unpack_layer;
use super::target_tree::TargetTree;

/// Longest list or description in an archive: those of large images have some hundred KiB.
const DOCUMENT_BYTES_MAX: u64 = 16 << 20;

/// Lists in lists: an index of platforms is one.
const INDEX_DEPTH_MAX: usize = 4;

/// The operating system whose programs run here.
const SYSTEM: &str = "linux";

/// Unpacks the layers of a container image, in their order.
///
/// # Errors
/// It is no such archive, a digest is another, or a layer cannot be unpacked.
pub(super) fn unpack_container(file: File, tree: &mut TargetTree) -> Result<ImageDescription> {
    let archive = MemberIndex::read(file)?;
    let image = match archive.has("index.json") {
        true => find_oci_image(&archive)?,
        false if archive.has("manifest.json") => find_saved_image(&archive)?,
        false => bail!(
            "it is no container image: it has neither index.json (an OCI layout, as `skopeo copy \
             docker://NAME oci-archive:FILE` writes) nor manifest.json (`docker save`)"
        ),
    };
    let config: ImageConfig = serde_json::from_slice(&image.config)
        .context("the image's configuration cannot be understood")?;
    let contents = &config.rootfs.diff_ids;
    if contents.len() != image.layers.len() {
        let (listed, known) = (image.layers.len(), contents.len());
        bail!("the image has {listed} layers, and its configuration has {known}");
    }
    for (layer, content) in image.layers.iter().zip(contents) {
        unpack_member(&archive, layer, &ImageDigest::parse(content)?, tree)?;
    }
    let variable = |text: &String| {
        let (name, value) = text.split_once('=')?;
        Some((name.to_owned(), value.to_owned()))
    };
    let variables = config.config.unwrap_or_default().variables;
    Ok(ImageDescription {
        environment: variables
            .unwrap_or_default()
            .iter()
            .filter_map(variable)
            .collect(),
        digest: digest_of(&image.config).to_string(),
        names: image.names,
    })
}

/// An image of an archive, its configuration with the right digest.
struct FoundImage {
    config: Vec<u8>,
    layers: Vec<LayerMember>,
    names: Vec<String>,
}

/// A layer as the archive has it.
struct LayerMember {
    member: String,
    /// Its digest as it is, perhaps compressed; `docker save` has none of that.
    digest: Option<ImageDigest>,
}

fn unpack_member(
    archive: &MemberIndex,
    layer: &LayerMember,
    content: &ImageDigest,
    tree: &mut TargetTree,
) -> Result<()> {
    let mut packed = HashingReader::new(BufReader::new(archive.open(&layer.member)?));
    let mut plain = HashingReader::new(decompress(&mut packed)?);
    unpack_layer(&mut plain, tree).with_context(|| format!("layer {content}"))?;
    let found = plain.finish()?;
    if found != *content {
        bail!("the layer {content} has other content: {found}; fetch the image anew");
    }
    let found = packed.finish()?;
    match &layer.digest {
        Some(digest) if *digest != found => {
            bail!("the layer {digest} is damaged: its digest is {found}; fetch the image anew")
        }
        _ => Ok(()),
    }
}

/// Where each member of an archive is, so that they can be read in any order.
struct MemberIndex {
    file: File,
    /// Offset and bytes.
    members: BTreeMap<String, (u64, u64)>,
}

impl MemberIndex {
    fn read(mut file: File) -> Result<Self> {
        let mut members = BTreeMap::new();
        let bytes = file.metadata()?.len();
        file.seek(SeekFrom::Start(0))?;
        let mut archive = Archive::new(&file);
        let entries = archive.entries_with_seek();
        for entry in entries.context("it is no tar archive")? {
            let entry = entry.context("it is no whole tar archive")?;
            let kind = entry.header().entry_type();
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            let name = name.strip_prefix("./").unwrap_or(&name).to_owned();
            let place = (entry.raw_file_position(), entry.size());
            if place.0.saturating_add(place.1) > bytes {
                bail!("the archive ends within {name}");
            }
            if kind.is_file() {
                members.insert(name, place);
            } else if kind.is_symlink() || kind.is_hard_link() {
                // Old archives have a layer that two images share once.
                let link = entry.link_name_bytes().unwrap_or_default().into_owned();
                let link = String::from_utf8_lossy(&link).into_owned();
                let shared = resolve_member(&name, &link);
                if let Some(place) = members.get(&shared).copied() {
                    members.insert(name, place);
                }
            }
        }
        Ok(Self { file, members })
    }

    fn has(&self, name: &str) -> bool {
        self.members.contains_key(name)
    }

    fn open(&self, name: &str) -> Result<MemberReader<'_>> {
        let place = self.members.get(name).copied();
        let (offset, bytes) = place.with_context(|| format!("the archive has no {name}"))?;
        Ok(MemberReader {
            file: &self.file,
            offset,
            end: offset + bytes,
        })
    }

    fn read_document(&self, name: &str) -> Result<Vec<u8>> {
        let member = self.open(name)?;
        if member.end - member.offset > DOCUMENT_BYTES_MAX {
            bail!("{name} has more than {DOCUMENT_BYTES_MAX} bytes");
        }
        let mut document = Vec::new();
        { member }.read_to_end(&mut document)?;
        Ok(document)
    }

    /// A document that must have this digest.
    fn read_blob(&self, digest: &ImageDigest) -> Result<Vec<u8>> {
        let document = self.read_document(&blob_member(digest))?;
        let found = digest_of(&document);
        if found != *digest {
            bail!("{digest} is damaged: its digest is {found}; fetch the image anew");
        }
        Ok(document)
    }
}

/// What a link of an archive names: `../ID/layer.tar` from `OTHER/layer.tar`.
fn resolve_member(name: &str, link: &str) -> String {
    let mut parts: Vec<&str> = name.split('/').collect();
    parts.pop();
    if !link.starts_with("../") {
        return link.to_owned();
    }
    for part in link.split('/') {
        match part {
            ".." => _ = parts.pop(),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

struct MemberReader<'f> {
    file: &'f File,
    offset: u64,
    end: u64,
}

impl Read for MemberReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let left = usize::try_from(self.end - self.offset).unwrap_or(usize::MAX);
        let length = buffer.len().min(left);
        let read = self.file.read_at(&mut buffer[..length], self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}

/// A part of an OCI layout.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    #[serde(default)]
    platform: Option<Platform>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Deserialize)]
struct Platform {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
}

/// An index of images, or one image.
#[derive(Debug, Deserialize)]
struct Manifest {
    #[serde(default)]
    manifests: Vec<Descriptor>,
    #[serde(default)]
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
struct ImageConfig {
    #[serde(default)]
    config: Option<RunConfig>,
    rootfs: RootFileSystem,
}

#[derive(Debug, Default, Deserialize)]
struct RunConfig {
    #[serde(rename = "Env", default)]
    variables: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
struct RootFileSystem {
    /// Digests of the layers, not compressed.
    #[serde(default)]
    diff_ids: Vec<String>,
}

/// An image as `docker save` lists it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct SavedImage {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

fn parse<T: DeserializeOwned>(document: &[u8], name: &str) -> Result<T> {
    serde_json::from_slice(document).with_context(|| format!("{name} cannot be understood"))
}

fn blob_member(digest: &ImageDigest) -> String {
    format!("blobs/sha256/{}", digest.digits())
}

fn find_oci_image(archive: &MemberIndex) -> Result<FoundImage> {
    let mut manifest: Manifest = parse(&archive.read_document("index.json")?, "index.json")?;
    let mut names = Vec::new();
    for _ in 0..INDEX_DEPTH_MAX {
        let Some(config) = &manifest.config else {
            let chosen = choose_image(&manifest.manifests)?;
            let name = chosen.annotations.get("org.opencontainers.image.ref.name");
            names.extend(name.cloned());
            let digest = ImageDigest::parse(&chosen.digest)?;
            manifest = parse(&archive.read_blob(&digest)?, &chosen.digest)?;
            continue;
        };
        let layers = manifest.layers.iter().map(|layer| {
            let digest = ImageDigest::parse(&layer.digest)?;
            Ok(LayerMember {
                member: blob_member(&digest),
                digest: Some(digest),
            })
        });
        return Ok(FoundImage {
            config: archive.read_blob(&ImageDigest::parse(&config.digest)?)?,
            layers: layers.collect::<Result<_>>()?,
            names,
        });
    }
    bail!("the archive's lists have no image")
}

/// The image for this machine, or the only one.
fn choose_image(images: &[Descriptor]) -> Result<&Descriptor> {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let is_ours =
        |platform: &Platform| platform.os == SYSTEM && platform.architecture == architecture;
    let ours = |image: &&Descriptor| image.platform.as_ref().is_some_and(is_ours);
    let unknown = |image: &&Descriptor| image.platform.is_none();
    if let Some(image) = images.iter().find(ours) {
        return Ok(image);
    }
    let mut others = images.iter().filter(unknown);
    match (others.next(), others.next()) {
        (Some(only), None) => Ok(only),
        (Some(_), Some(_)) => bail!(
            "the archive has several images; write one with `skopeo copy` or `docker save NAME`"
        ),
        (None, _) => {
            let listed = images.iter().filter_map(|image| image.platform.as_ref());
            let listed: Vec<_> = listed
                .map(|it| format!("{}/{}", it.os, it.architecture))
                .collect();
            let media: Vec<_> = images.iter().map(|it| it.media_type.as_str()).collect();
            let others = match listed.is_empty() {
                true => media.join(", "),
                false => listed.join(", "),
            };
            bail!("the archive has no image for {SYSTEM}/{architecture}, but {others}")
        }
    }
}

fn find_saved_image(archive: &MemberIndex) -> Result<FoundImage> {
    let document = archive.read_document("manifest.json")?;
    let mut images: Vec<SavedImage> = parse(&document, "manifest.json")?;
    let (Some(image), true) = (images.pop(), images.is_empty()) else {
        bail!("the archive has not one image; write one with `docker save NAME`");
    };
    let config = archive.read_document(&image.config)?;
    // The file is named after its digest, with an ending or a directory.
    let name = image.config.rsplit('/').next().unwrap_or_default();
    let name = name.strip_suffix(".json").unwrap_or(name);
    let (wanted, found) = (
        ImageDigest::parse(&format!("sha256:{name}"))?,
        digest_of(&config),
    );
    if wanted != found {
        bail!("the configuration {wanted} is damaged: its digest is {found}");
    }
    let layers = image.layers.into_iter().map(|member| LayerMember {
        member,
        digest: None,
    });
    Ok(FoundImage {
        config,
        layers: layers.collect(),
        names: image.repo_tags.unwrap_or_default(),
    })
}
