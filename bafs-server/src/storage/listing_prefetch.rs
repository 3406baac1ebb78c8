//! The listing of what a volume is filled with, page by page. Of a home it is read to its end
//! before any byte is copied: what does not fit is refused at once. Makes no file.

use std::collections::VecDeque;

use bafs_proto::message::SourceKind;
use bafs_proto::replica::TreePage;
use bafs_proto::{Error, ErrorCode, Result};

use super::fill_source::FillSource;
use super::fill_usage::FillUsage;

/// Pages that are kept until their files are copied, some MiB; later ones are asked for again.
const PAGES_MAX: usize = 16;

/// The pages of a listing.
#[derive(Debug)]
pub(super) struct ListingPrefetch {
    pages: VecDeque<TreePage>,
    /// Where the listing goes on behind those: after which path. `None` at its end.
    next_position: Option<Option<String>>,
}

impl ListingPrefetch {
    /// Lists a home, and checks that so many files of so many bytes may be in the volume. Another
    /// volume is listed as it is copied: a copy has the size of the original.
    ///
    /// # Errors
    /// `TooLarge`; what the source answers.
    pub(super) async fn new(origin: &FillSource, taken: &FillUsage) -> Result<Self> {
        let mut this = Self {
            pages: VecDeque::new(),
            next_position: Some(None),
        };
        if !origin.is_home() {
            return Ok(this);
        }
        let (mut files, mut bytes) = (0u64, 0u64);
        let mut at = Some(None);
        while let Some(after) = at {
            let listed = origin.list(after).await?;
            for entry in &listed.page.entries {
                let is_directory = entry.kind == SourceKind::Directory;
                if is_directory && entry.path.is_empty() {
                    continue;
                }
                files += 1;
                taken.check_file_room(files)?;
                // Nobody says how much of a file is holes.
                if entry.kind == SourceKind::File {
                    bytes = bytes.saturating_add(entry.identity.size);
                    taken.check_byte_room(bytes, &entry.path)?;
                }
            }
            at = position_after(&listed)?;
            if this.pages.len() < PAGES_MAX {
                this.next_position.clone_from(&at);
                this.pages.push_back(listed);
            }
        }
        Ok(this)
    }

    /// The next page; `None` at the end.
    ///
    /// # Errors
    /// What the source answers.
    pub(super) async fn next(&mut self, origin: &FillSource) -> Result<Option<TreePage>> {
        if let Some(kept) = self.pages.pop_front() {
            return Ok(Some(kept));
        }
        let Some(after) = self.next_position.take() else {
            return Ok(None);
        };
        let listed = origin.list(after).await?;
        self.next_position = position_after(&listed)?;
        Ok(Some(listed))
    }
}

/// Where the listing goes on behind a page.
fn position_after(listed: &TreePage) -> Result<Option<Option<String>>> {
    if !listed.page.has_more {
        return Ok(None);
    }
    let last = listed.page.entries.last();
    let last = last.ok_or_else(|| {
        let text = "the source sends empty pages; it is of another version or damaged";
        Error::new(ErrorCode::Malformed, text)
    })?;
    Ok(Some(Some(last.path.clone())))
}
