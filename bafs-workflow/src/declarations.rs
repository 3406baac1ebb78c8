//! Statements to declarations: which word is a name, a size, a URL. Whether a name exists, and
//! whether declarations agree, is `check.rs`.

use std::collections::BTreeMap;
use std::rc::Rc;

use bafs_proto::path::{PROGRAM_DIRECTORY, SCRIPT_DIRECTORY};

use super::ast::{
    Declarations, Description, DescriptionEntry, DescriptionKey, JobDeclaration, JobSettings,
    Keyword, ProgramDeclaration, VolumeDeclaration, Word, bytes_of,
};
use super::diagnostic::Diagnostics;
use super::job_description::{build_settings, parse_description};
use super::limits::DESCRIPTION_BYTES_MAX;
use super::model::VolumeKind;
use super::path::parse_relative;
use super::programs::{PROGRAM_BYTES_DEFAULT, cache_bytes_of, find_script_argument};
use super::scope::VariableScope;
use super::sources::{Sources, directory_of, resolve_path};
use super::templates::{TemplateUse, Templates, merge_entries};
use super::word_cursor::{ParseResult, ReportedError, WordCursor};

/// Turns statements into declarations and reads the description files that they name.
pub(super) struct DeclarationBuilder<'r> {
    pub(super) declarations: Declarations,
    sources: &'r dyn Sources,
    /// The directory of each file with its trailing slash, or nothing, by the file's number.
    directories: BTreeMap<u32, String>,
    templates: Templates,
    /// Description files read so far; none for one that cannot be read, which is told once.
    descriptions: BTreeMap<String, Option<Rc<Description>>>,
    /// Where jobs have scripts beside the workflow, by their paths; none for what is no such file.
    scripts: BTreeMap<String, Option<String>>,
    /// What all statements so far take in memory, about.
    pub(super) bytes: u64,
}

impl<'r> DeclarationBuilder<'r> {
    pub(super) fn new(file: &str, sources: &'r dyn Sources) -> Self {
        let mut made = Self {
            declarations: Declarations::default(),
            sources,
            directories: BTreeMap::new(),
            templates: Templates::default(),
            descriptions: BTreeMap::new(),
            scripts: BTreeMap::new(),
            bytes: 0,
        };
        made.add_directory(0, file);
        made
    }

    /// Where texts and listings come from.
    pub(super) fn sources(&self) -> &'r dyn Sources {
        self.sources
    }

    /// Remembers where a file of diagnostics is.
    pub(super) fn add_directory(&mut self, file: u32, path: &str) {
        let directory = directory_of(path).to_owned();
        self.directories.insert(file, directory);
    }

    /// The directory of a file with its trailing slash, or nothing.
    pub(super) fn directory(&self, file: u32) -> &str {
        self.directories.get(&file).map_or("", String::as_str)
    }

    /// Takes one statement. One with an error is declared as far as it goes when its name is
    /// known, so that uses of the name are not errors too.
    pub(super) fn declare_statement(
        &mut self,
        keyword: Keyword,
        words: &[Word],
        inline: Option<&Rc<Description>>,
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
            Keyword::Root => cursor.root().map(|d| self.declarations.roots.push(d)),
            Keyword::Program => self.program(&mut cursor),
            Keyword::Template => {
                let is_in_loop = !scope.is_empty();
                self.templates.declare(&mut cursor, inline, is_in_loop)
            }
            Keyword::For | Keyword::End | Keyword::Include => {
                unreachable!("the expander takes these")
            }
        };
        if parsed.is_err() {
            self.declarations.is_partial = true;
        }
    }

    fn job(
        &mut self,
        cursor: &mut WordCursor<'_, '_>,
        inline: Option<&Rc<Description>>,
        scope: &VariableScope,
    ) -> ParseResult<()> {
        let name = cursor.name("a job's name")?;
        let end = cursor.words.len() - usize::from(inline.is_some());
        let is_from = |word: &Word| word.text == "from" && word.quote.is_none();
        if cursor.words.get(2).is_some_and(is_from) && end > 3 {
            cursor.next += 1;
            let used = self.templates.find_use(cursor, end).ok();
            self.declare_job(name, used, inline, scope, cursor.diagnostics);
            return Ok(());
        }
        let file = match inline {
            Some(_) => None,
            None => cursor.description_file().ok(),
        };
        cursor.end_at(end);
        let diagnostics = &mut *cursor.diagnostics;
        let read = file.and_then(|file| self.description(&file, diagnostics));
        let description = inline.or(read.as_ref());
        self.declare_job(name, None, description, scope, diagnostics);
        Ok(())
    }

    fn declare_job(
        &mut self,
        name: Word,
        used: Option<TemplateUse>,
        own: Option<&Rc<Description>>,
        scope: &VariableScope,
        diagnostics: &mut Diagnostics,
    ) {
        let own = own.map(Rc::as_ref);
        let nothing = Description::default();
        let (template, values) = match &used {
            Some(used) => (used.template.description.as_ref(), used.values.clone()),
            None => (&nothing, Vec::new()),
        };
        let entries = merge_entries(template, own);
        let size = |entry: &&DescriptionEntry| bytes_of(&entry.values);
        let bytes: u64 = entries.iter().map(size).sum();
        self.bytes = self.bytes.saturating_add(bytes);
        let is_read = used.is_some() || own.is_some();
        let has_rejected_lines =
            template.has_rejected_lines || own.is_some_and(|own| own.has_rejected_lines);
        let is_program = |entry: &&DescriptionEntry| {
            matches!(
                entry.key,
                DescriptionKey::Executable | DescriptionKey::Script
            )
        };
        let is_missing_executable =
            is_read && !has_rejected_lines && !entries.iter().any(is_program);
        let mut settings = build_settings(&entries, &scope.with_parameters(values), diagnostics);
        self.bring_scripts(&mut settings);
        self.declarations.jobs.push(JobDeclaration {
            name,
            settings,
            is_missing_executable,
        });
    }

    fn program(&mut self, cursor: &mut WordCursor<'_, '_>) -> ParseResult<()> {
        let name = cursor.name("a program's name")?;
        cursor.expect_word("from")?;
        let from = cursor.word("a URL, or a path beside the workflow")?;
        let (source, mut size_bytes) = match from.text.contains("://") {
            true => (cursor.parse_url(&from)?, PROGRAM_BYTES_DEFAULT),
            false => {
                let path = resolve_path(self.directory(from.location.file), &from.text);
                let located = self.sources.locate(&path).map_err(|reason| {
                    let message = format!("the program '{path}' cannot be brought: {reason}");
                    let hint = "paths of programs are relative to the workflow file";
                    cursor.diagnostics.error_hint(from.location, message, hint);
                    ReportedError
                })?;
                (located.url, cache_bytes_of(located.bytes))
            }
        };
        if cursor.next < cursor.words.len() {
            size_bytes = cursor.size("a size such as 10 MB")?;
        }
        cursor.end();
        self.declarations.programs.push(ProgramDeclaration {
            path: format!("{PROGRAM_DIRECTORY}/{}", name.text),
            name,
            source,
            size_bytes,
        });
        Ok(())
    }

    /// Has scripts beside the workflow brought to a job: its executable if it is written `./NAME`,
    /// and what its interpreter runs. What is not there is looked for in the job's directory.
    fn bring_scripts(&mut self, settings: &mut JobSettings) {
        let Some(executable) = &mut settings.executable else {
            return;
        };
        if let Some(at) = find_script_argument(&executable.text, &settings.arguments) {
            let word = &mut settings.arguments[at];
            let below = word.strip_prefix("./").unwrap_or(word);
            if let Some(place) = self.bring_script(below, executable) {
                *word = place;
            }
        }
        if let Some(below) = executable.text.strip_prefix("./")
            && let Some(place) = self.bring_script(below, executable)
        {
            executable.text = place;
        }
    }

    /// Where jobs find a script beside the file that has the word `named_at`, if it is there.
    fn bring_script(&mut self, below: &str, named_at: &Word) -> Option<String> {
        let below = parse_relative(below).ok()?;
        let path = resolve_path(self.directory(named_at.location.file), &below);
        let known = self.scripts.entry(path).or_insert_with_key(|path| {
            let located = self.sources.locate(path).ok()?;
            let place = format!("{SCRIPT_DIRECTORY}/{below}");
            let is_taken = |it: &ProgramDeclaration| it.path == place;
            let place = match self.declarations.programs.iter().any(is_taken) {
                // Another of this name, beside an included file.
                true => {
                    let number = self.declarations.programs.len();
                    format!("{SCRIPT_DIRECTORY}/{number}/{below}")
                }
                false => place,
            };
            self.declarations.programs.push(ProgramDeclaration {
                name: Word {
                    text: place.clone(),
                    ..named_at.clone()
                },
                source: located.url,
                size_bytes: cache_bytes_of(located.bytes),
                path: place.clone(),
            });
            Some(place)
        });
        known.clone()
    }

    fn description(
        &mut self,
        file: &Word,
        diagnostics: &mut Diagnostics,
    ) -> Option<Rc<Description>> {
        let path = resolve_path(self.directory(file.location.file), &file.text);
        if let Some(known) = self.descriptions.get(&path) {
            return known.clone();
        }
        let description = match self.sources.read(&path, DESCRIPTION_BYTES_MAX) {
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
        self.descriptions.insert(path, description.clone());
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
                    limit: None,
                }),
            );
        Ok(())
    }
}
