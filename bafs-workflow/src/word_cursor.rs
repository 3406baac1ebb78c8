//! The words of one statement, read from left to right: names, sizes, URLs. Whether a name exists
//! is `check.rs`.

use bafs_proto::volume::LimitKind;

use super::ast::{
    Access, ExtractDeclaration, Keyword, MountDeclaration, ParentDeclaration, RetryDeclaration,
    RootDeclaration, SharedDirectoryDeclaration, VolumeDeclaration, Word,
};
use super::diagnostic::{Diagnostics, SourceLocation};
use super::job_description::{parse_integer, parse_shared_directory};
use super::limits::{FILES_MAX, NAME_BYTES_MAX, RETRIES_MAX};
use super::model::{CachePolicy, VolumeKind};
use super::quantities::parse_size;
use super::spelling::find_nearest;
use super::url::Url;

/// Options of a `volume` statement; a word that is one of them is no unit of size.
const VOLUME_OPTIONS: [&str; 7] = ["exact", "files", "from", "lru", "mru", "warm", "watched"];

/// In the place of the size of a scratch volume: it is measured.
const UNKNOWN_SIZE: &str = "unknown";

/// An error was found and reported.
pub(super) struct ReportedError;

pub(super) type ParseResult<T> = Result<T, ReportedError>;

/// The words of one statement from left to right.
pub(super) struct WordCursor<'w, 'd> {
    pub(super) keyword: Keyword,
    pub(super) words: &'w [Word],
    pub(super) next: usize,
    pub(super) diagnostics: &'d mut Diagnostics,
}

impl WordCursor<'_, '_> {
    pub(super) fn description_file(&mut self) -> ParseResult<Word> {
        let file = self.word("a description file or '{'")?;
        if file.text == "{" && file.quote.is_none() {
            self.next = self.words.len();
            let message = "expected the end of the line after '{'".to_owned();
            return self.reject(file.location, message);
        }
        Ok(file)
    }

    pub(super) fn parent(&mut self) -> ParseResult<ParentDeclaration> {
        let is_child = |word: &Word| word.text.eq_ignore_ascii_case("child");
        let Some(middle) = self.words.iter().position(is_child) else {
            let last = self.words[self.words.len() - 1].location;
            return self.reject(
                last,
                "expected 'child' and the jobs that come after".to_owned(),
            );
        };
        let (parents, children) = (&self.words[1..middle], &self.words[middle + 1..]);
        if parents.is_empty() || children.is_empty() {
            let side = if parents.is_empty() {
                "before"
            } else {
                "after"
            };
            let place = self.words[middle].location;
            return self.reject(place, format!("expected a job {side} 'child'"));
        }
        Ok(ParentDeclaration {
            parents: parents.to_vec(),
            children: children.to_vec(),
        })
    }

    pub(super) fn mount(&mut self) -> ParseResult<MountDeclaration> {
        let volume = self.name("a volume")?;
        let job = self.name("a job")?;
        let path = self.word("a path")?;
        let option = self.words.get(self.next);
        let access = option.and_then(|word| match word.text.to_ascii_lowercase().as_str() {
            "ro" => Some((Access::ReadOnly, word.location)),
            "rw" => Some((Access::ReadWrite, word.location)),
            "write-back" => Some((Access::WriteBack, word.location)),
            _ => None,
        });
        self.next += usize::from(access.is_some());
        self.end();
        Ok(MountDeclaration {
            volume,
            job,
            path,
            access,
        })
    }

    pub(super) fn extract(&mut self) -> ParseResult<ExtractDeclaration> {
        let volume = self.name("a volume")?;
        let mut paths = vec![self.word("a file of the volume")?];
        let rest = &self.words[self.next..];
        // Without a URL, the next word is told to be none.
        let urls = rest.iter().position(|word| word.text.contains("://"));
        for _ in 0..urls.unwrap_or(0) {
            paths.push(self.word("a file of the volume")?);
        }
        let target_place = self.next_place();
        let next = self.words.get(self.next);
        let is_directory = next.is_some_and(|word| word.text.ends_with('/'));
        let target = self.url()?;
        self.end();
        Ok(ExtractDeclaration {
            volume,
            paths,
            target,
            is_directory,
            target_location: target_place,
        })
    }

    pub(super) fn retry(&mut self) -> ParseResult<RetryDeclaration> {
        let job = self.name("a job")?;
        let count = self.word("a number")?;
        let retries = parse_integer(&count, 0, RETRIES_MAX, "'retry'", self.diagnostics);
        self.end();
        retries
            .map(|value| RetryDeclaration {
                job,
                retries: value as u32,
            })
            .ok_or(ReportedError)
    }

    pub(super) fn share(&mut self) -> ParseResult<SharedDirectoryDeclaration> {
        let path = self.word("'/tmp', '/var/tmp' or '/dev/shm'")?;
        let path = parse_shared_directory(&path, self.diagnostics).ok_or(ReportedError)?;
        let mut jobs = vec![self.name("a job")?];
        while self.next < self.words.len() {
            jobs.push(self.name("a job")?);
        }
        Ok(SharedDirectoryDeclaration { path, jobs })
    }

    pub(super) fn root(&mut self) -> ParseResult<RootDeclaration> {
        let volume = self.name("a volume")?;
        let mut jobs = vec![self.name("a job")?];
        while self.next < self.words.len() {
            jobs.push(self.name("a job")?);
        }
        Ok(RootDeclaration { volume, jobs })
    }

    /// The word that must come next.
    pub(super) fn expect_word(&mut self, text: &str) -> ParseResult<()> {
        let word = self.word(&format!("'{text}'"))?;
        match word.text.eq_ignore_ascii_case(text) {
            true => Ok(()),
            false => self.reject(
                word.location,
                format!("expected '{text}', not '{}'", word.text),
            ),
        }
    }

    /// What follows the name of a volume. The name comes back when there is an error.
    pub(super) fn parse_volume_rest(
        &mut self,
        name: Word,
    ) -> Result<VolumeDeclaration, (Word, ReportedError)> {
        match self.volume_kind() {
            Ok((mut kind, size_bytes, size_place)) => {
                let is_known = size_bytes.is_some();
                let (size_files, limit) = self.volume_options(&mut kind, is_known);
                Ok(VolumeDeclaration {
                    name,
                    kind,
                    size_bytes,
                    size_location: size_place,
                    size_files,
                    limit,
                })
            }
            Err(reported) => Err((name, reported)),
        }
    }

    fn volume_kind(&mut self) -> ParseResult<(VolumeKind, Option<u64>, SourceLocation)> {
        let word = self.word("'scratch', 'cache' or a URL")?;
        let kind = if word.text.eq_ignore_ascii_case("scratch") {
            VolumeKind::Scratch { fill: None }
        } else {
            if word.text.contains("://") {
                self.next -= 1;
            } else if !word.text.eq_ignore_ascii_case("cache") {
                let message = format!("unknown kind of volume '{}'", word.text);
                return match find_nearest(&word.text, ["scratch", "cache"]) {
                    Some(near) => {
                        let hint = format!("did you mean '{near}'?");
                        self.diagnostics.error_hint(word.location, message, hint);
                        Err(ReportedError)
                    }
                    None => self.reject(word.location, message),
                };
            }
            VolumeKind::Cache {
                source: self.url()?,
                policy: CachePolicy::Lru,
                is_warmed: false,
            }
        };
        let size_place = self.next_place();
        let next = self.words.get(self.next);
        let is_unknown = next.is_some_and(|word| word.text.eq_ignore_ascii_case(UNKNOWN_SIZE));
        let is_scratch = matches!(kind, VolumeKind::Scratch { .. });
        if is_unknown && is_scratch {
            self.next += 1;
            return Ok((kind, None, size_place));
        }
        if is_unknown {
            let message = "only the size of a scratch volume may be 'unknown'";
            let hint = "write how large the source is, or what of it may be kept near the jobs, \
                        such as 10 MB";
            self.diagnostics.error_hint(size_place, message, hint);
            return Err(ReportedError);
        }
        let expected = match is_scratch {
            true => "a size such as 10 MB, or 'unknown' to have it measured,",
            false => "a size such as 10 MB",
        };
        Ok((kind, Some(self.size(expected)?), size_place))
    }

    /// Options in any order. One with an error is reported and left out.
    fn volume_options(
        &mut self,
        kind: &mut VolumeKind,
        is_known: bool,
    ) -> (Option<u64>, Option<LimitKind>) {
        let (mut files, mut limit) = (None, None);
        while let Some(word) = self.words.get(self.next).cloned() {
            self.next += 1;
            let option = word.text.to_ascii_lowercase();
            match (option.as_str(), &mut *kind) {
                ("files", _) if files.is_none() => {
                    let Ok(count) = self.word("a number of files") else {
                        break;
                    };
                    files = parse_integer(&count, 1, FILES_MAX, "'files'", self.diagnostics);
                }
                ("from", VolumeKind::Scratch { fill: fill @ None }) => match self.url() {
                    Ok(url) => *fill = Some(url),
                    Err(ReportedError) => break,
                },
                ("exact", VolumeKind::Scratch { .. }) if limit.is_none() => {
                    limit = Some(LimitKind::Exact);
                }
                ("watched", VolumeKind::Scratch { .. }) if is_known && limit.is_none() => {
                    limit = Some(LimitKind::Watched);
                }
                ("exact" | "watched", VolumeKind::Scratch { .. }) if limit.is_some() => {
                    let hint = "a limit is kept in one way: write 'exact' or 'watched'";
                    let message = format!("'{option}' follows another word for the same");
                    self.diagnostics.error_hint(word.location, message, hint);
                }
                ("watched", VolumeKind::Scratch { .. }) => {
                    let hint = "what it held past its limit would be measured too";
                    let message = "a volume whose size is 'unknown' cannot be 'watched'";
                    self.diagnostics.error_hint(word.location, message, hint);
                }
                ("exact" | "watched", VolumeKind::Cache { .. }) => {
                    let hint = "a cache volume always keeps its size exactly";
                    let message = format!("'{option}' belongs to scratch volumes only");
                    self.diagnostics.error_hint(word.location, message, hint);
                }
                ("lru", VolumeKind::Cache { policy, .. }) => *policy = CachePolicy::Lru,
                ("mru", VolumeKind::Cache { policy, .. }) => *policy = CachePolicy::Mru,
                ("warm", VolumeKind::Cache { is_warmed, .. }) => *is_warmed = true,
                ("from", VolumeKind::Cache { .. }) => {
                    let hint = "a cache volume names its source before the size";
                    let message = "'from' belongs to scratch volumes only";
                    self.diagnostics.error_hint(word.location, message, hint);
                    break;
                }
                ("lru" | "mru" | "warm", VolumeKind::Scratch { .. }) => {
                    let hint = "a scratch volume keeps everything that is written to it";
                    let message = format!("'{option}' belongs to cache volumes only");
                    self.diagnostics.error_hint(word.location, message, hint);
                }
                _ => {
                    let _ = self.reject::<()>(word.location, format!("unexpected '{}'", word.text));
                    break;
                }
            }
        }
        (files, limit)
    }

    /// A size of one word or two.
    pub(super) fn size(&mut self, expected: &str) -> ParseResult<u64> {
        let number = self.word(expected)?;
        let is_number = number
            .text
            .bytes()
            .all(|byte| byte.is_ascii_digit() || byte == b'.');
        let option = |word: &Word| {
            VOLUME_OPTIONS
                .iter()
                .any(|o| word.text.eq_ignore_ascii_case(o))
        };
        let unit = self
            .words
            .get(self.next)
            .filter(|word| is_number && !option(word));
        let text = match unit {
            Some(unit) => format!("{} {}", number.text, unit.text),
            None => number.text,
        };
        self.next += usize::from(unit.is_some());
        parse_size(&text).map_err(|error| {
            error.report(number.location, self.diagnostics);
            ReportedError
        })
    }

    fn url(&mut self) -> ParseResult<Url> {
        let word = self.word("a URL")?;
        self.parse_url(&word)
    }

    /// The place that a word names.
    pub(super) fn parse_url(&mut self, word: &Word) -> ParseResult<Url> {
        word.text.parse().map_err(|error: super::url::UrlError| {
            match error.hint {
                Some(hint) => self
                    .diagnostics
                    .error_hint(word.location, error.message, hint),
                None => self.diagnostics.error(word.location, error.message),
            }
            ReportedError
        })
    }

    /// A job's or volume's name. It becomes part of paths and messages, so its letters are few.
    pub(super) fn name(&mut self, expected: &str) -> ParseResult<Word> {
        let word = self.word(expected)?;
        let text = &word.text;
        let is_letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        let begins = text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
        if begins && text.chars().all(is_letter) && text.len() <= NAME_BYTES_MAX {
            return Ok(word);
        }
        let message = format!("expected {expected}, but '{text}' cannot be a name");
        let hint = "names are letters, digits, '_', '-' and '.', and begin with a letter or digit";
        self.diagnostics.error_hint(word.location, message, hint);
        Err(ReportedError)
    }

    pub(super) fn word(&mut self, expected: &str) -> ParseResult<Word> {
        let Some(word) = self.words.get(self.next) else {
            let last = self.words[self.words.len() - 1].location;
            return self.reject(last, format!("expected {expected} after this"));
        };
        self.next += 1;
        Ok(word.clone())
    }

    fn next_place(&self) -> SourceLocation {
        let last = self.words.len() - 1;
        self.words[self.next.min(last)].location
    }

    pub(super) fn end(&mut self) {
        self.end_at(self.words.len());
    }

    /// Reports a word between the next one and `end`. What came before it is still declared.
    pub(super) fn end_at(&mut self, end: usize) {
        if let Some(extra) = self.words[..end].get(self.next) {
            let _ = self.reject::<()>(extra.location, format!("unexpected '{}'", extra.text));
        }
    }

    pub(super) fn reject<T>(&mut self, at: SourceLocation, message: String) -> ParseResult<T> {
        self.diagnostics
            .error_hint(at, message, self.keyword.syntax());
        Err(ReportedError)
    }
}
