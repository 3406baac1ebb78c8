//! What an unpacked image says of itself, in a file at its top. Whoever unpacks an image writes it,
//! and the agent of a job that has the image as its root reads it.

use serde::{Deserialize, Serialize};

/// The name of the file.
pub const IMAGE_DESCRIPTION_FILE: &str = ".bafs-image.json";

/// Its longest text in bytes: more than the variables of an image, which Linux must take at once.
pub const IMAGE_DESCRIPTION_BYTES_MAX: u64 = 1 << 20;

/// An unpacked image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageDescription {
    /// Variables for programs in it, with their values, in the order of the image.
    #[serde(default)]
    pub environment: Vec<(String, String)>,
    /// The digest of what was unpacked, as the image has it: `sha256:…`.
    #[serde(default)]
    pub digest: String,
    /// Names by which it was known.
    #[serde(default)]
    pub names: Vec<String>,
}
