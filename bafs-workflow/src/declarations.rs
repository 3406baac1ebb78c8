//! Statements to declarations: which word is a name, a size, a URL. Whether a name exists, and
//! whether declarations agree, is `check.rs`.

use std::collections::BTreeMap;
use std::rc::Rc;

use bafs_proto::volume::LimitKind;

use super::ast::{
    Declarations, Description, DescriptionKey, JobDeclaration, JobSettings, Keyword,
    VolumeDeclaration, Word, bytes_of,
};
use super::diagnostic::Diagnostics;
use super::job_description::{build_settings, parse_description};
use super::limits::DESCRIPTION_BYTES_MAX;
use super::model::VolumeKind;
use super::scope::VariableScope;
use super::word_cursor::{ParseResult, ReportedError, WordCursor};

/// Turns statements into declarations and reads the description files that they name.
pub(super) struct DeclarationBuilder<'r> {
    pub(super) declarations: Declarations,
    read: &'r dyn Fn(&str) -> Result<String, String>,
    /// The directory of the workflow file with a trailing slash, or nothing.
    directory: &'r str,
    /// Description files read so far; none for one that cannot be read, which is told once.
    descriptions: BTreeMap<String, Option<Rc<Description>>>,
    /// What all statements so far take in memory, about.
    pub(super) bytes: u64,
}

impl<'r> DeclarationBuilder<'r> {
    pub(super) fn new(file: &'r str, read: &'r dyn Fn(&str) -> Result<String, String>) -> Self {
        let directory = &file[..file.rfind('/').map_or(0, |slash| slash + 1)];
        let declarations = Declarations::default();
        Self {
            declarations,
            read,
            directory,
            descriptions: BTreeMap::new(),
            bytes: 0,
        }
    }

    /// Takes one statement. One with an error is declared as far as it goes when its name is
    /// known, so that uses of the name are not errors too.
    pub(super) fn declare_statement(
        &mut self,
        keyword: Keyword,
        words: &[Word],
        inline: Option<&Description>,
        scope: &VariableScope,
        diagnostics: &mut Diagnostics,
    ) {
        self.bytes = self.bytes.saturating_add(bytes_of(words));
        let mut cursor = WordCursor {
            keyword,
            words,
            next: 1,
            diagnostics,
        };
        let parsed = match keyword {
            Keyword::Job => self.job(&mut cursor, inline, scope),
            Keyword::Volume => self.volume(&mut cursor),
            Keyword::Parent => cursor.parent().map(|d| self.declarations.parents.push(d)),
            Keyword::Mount => cursor.mount().map(|d| self.declarations.mounts.push(d)),
            Keyword::Extract => cursor.extract().map(|d| self.declarations.extracts.push(d)),
            Keyword::Retry => cursor.retry().map(|d| self.declarations.retries.push(d)),
            Keyword::Share => cursor.share().map(|d| self.declarations.shares.push(d)),
            Keyword::For | Keyword::End => unreachable!("the parser makes loops of these"),
        };
        if parsed.is_err() {
            self.declarations.is_partial = true;
        }
    }

    fn job(
        &mut self,
        cursor: &mut WordCursor<'_, '_>,
        inline: Option<&Description>,
        scope: &VariableScope,
    ) -> ParseResult<()> {
        let name = cursor.name("a job's name")?;
        let file = match inline {
            Some(_) => None,
            None => cursor.description_file().ok(),
        };
        let end = if inline.is_some() {
            cursor.words.len() - 1
        } else {
            cursor.words.len()
        };
        cursor.end_at(end);
        let diagnostics = &mut *cursor.diagnostics;
        let read = file.and_then(|file| self.description(&file, diagnostics));
        let description = inline.or(read.as_deref());
        self.bytes = self
            .bytes
            .saturating_add(description.map_or(0, Description::bytes));
        let lacks_executable = description.is_some_and(|known| {
            !known.has_rejected_lines
                && known
                    .entries
                    .iter()
                    .all(|entry| entry.key != DescriptionKey::Executable)
        });
        let settings = match description {
            Some(description) => build_settings(description, scope, diagnostics),
            None => JobSettings::default(),
        };
        self.declarations.jobs.push(JobDeclaration {
            name,
            settings,
            is_missing_executable: lacks_executable,
        });
        Ok(())
    }

    fn description(
        &mut self,
        file: &Word,
        diagnostics: &mut Diagnostics,
    ) -> Option<Rc<Description>> {
        if let Some(known) = self.descriptions.get(&file.text) {
            return known.clone();
        }
        let directory = if file.text.starts_with('/') {
            ""
        } else {
            self.directory
        };
        let path = format!("{directory}{}", file.text);
        let description = match (self.read)(&path) {
            Ok(text) if text.len() <= DESCRIPTION_BYTES_MAX => {
                let index = diagnostics.add_file(&path);
                Some(Rc::new(parse_description(index, &text, diagnostics)))
            }
            Ok(_) => {
                let message = format!("the job description '{path}' is larger than 1 MiB");
                diagnostics.error(file.location, message);
                None
            }
            Err(reason) => {
                let message = format!("cannot read the job description '{path}': {reason}");
                let hint = "paths of descriptions are relative to the workflow file";
                diagnostics.error_hint(file.location, message, hint);
                None
            }
        };
        self.descriptions
            .insert(file.text.clone(), description.clone());
        description
    }

    fn volume(&mut self, cursor: &mut WordCursor<'_, '_>) -> ParseResult<()> {
        let name = cursor.name("a volume's name")?;
        let name_place = name.location;
        let declared = cursor.parse_volume_rest(name);
        // A stand-in for what could not be read; the errors reported keep it from being used.
        self.declarations
            .volumes
            .push(
                declared.unwrap_or_else(|(name, ReportedError)| VolumeDeclaration {
                    name,
                    kind: VolumeKind::Scratch { fill: None },
                    size_bytes: Some(1),
                    size_location: name_place,
                    size_files: None,
                    limit: LimitKind::Exact,
                }),
            );
        Ok(())
    }
}
