//! The text of a workflow on its way to a service: with all files that it names, and nothing of the
//! machine of the service. It runs nothing.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use bafs_proto::ids::RunId;
use bafs_proto::path::{check_name, check_printable};
use bafs_proto::{Error, ErrorCode};
use bafs_queue::Submission;
use bafs_workflow::{
    FILE_BYTES_MAX, ListedEntry, LocatedFile, Sources, Url, Workflow, parse_workflow_with,
};

use super::run_files::RESERVED_NAMES;
use crate::beside_files::find_file;
use crate::home_view::HomeView;
use crate::input_file;
use crate::terminal_text;

/// Files that a workflow names at most.
const FILES_MAX: usize = 1_000;

/// What a call carries at most, with room for its other words: the body of a message has 4 MiB.
const TEXT_BYTES_MAX: usize = 3 << 20;

/// Statements of one submission: the service, which all users share, parses it. So many took
/// 0.7 GB.
const STATEMENTS_MAX: u64 = 500_000;

/// Bytes of the key of a submission.
const KEY_BYTES_MAX: usize = 64;

/// Bytes of a part of a path, less those of the name of a draft: what file systems take.
const NAME_BYTES_MAX: usize = 250;

/// Why a program beside a workflow does not reach its jobs.
const NO_PROGRAMS: &str = "a service takes no programs beside a workflow; put it at a home, and \
                           write 'program NAME from bafs://HOME/PATH'";

/// Lists a place of a home down to some levels.
pub(super) type ListHome<'l> =
    dyn Fn(&Url, usize, &dyn Fn(&str) -> bool) -> Result<Vec<ListedEntry>, String> + 'l;

/// Reads files beside a workflow, and remembers them.
struct RecordedFiles<'w> {
    directory: &'w Path,
    homes: &'w HomeView,
    files: RefCell<BTreeMap<String, String>>,
    /// Programs beside the workflow, which stay there.
    programs: RefCell<Vec<String>>,
}

impl Sources for RecordedFiles<'_> {
    fn read(&self, path: &str, bytes_max: usize) -> Result<String, String> {
        check_relative(path)?;
        let text = input_file::read_text(&self.directory.join(path), bytes_max);
        let text = text.map_err(|error| format!("{error:#}"))?;
        let mut files = self.files.borrow_mut();
        files.insert(path.to_owned(), text.clone());
        Ok(text)
    }

    fn list(
        &self,
        directory: &str,
        depth_max: usize,
        enters: &dyn Fn(&str) -> bool,
    ) -> Result<Vec<ListedEntry>, String> {
        list_home(directory, |url| self.homes.list(url, depth_max, enters))
    }

    fn locate(&self, path: &str) -> Result<LocatedFile, String> {
        find_file(&self.directory.join(path))?;
        self.programs.borrow_mut().push(path.to_owned());
        Err(NO_PROGRAMS.to_owned())
    }
}

/// Knows the files of a submission only.
struct SubmittedFiles<'s> {
    files: &'s BTreeMap<String, String>,
    list: &'s ListHome<'s>,
}

impl Sources for SubmittedFiles<'_> {
    fn read(&self, path: &str, bytes_max: usize) -> Result<String, String> {
        let text = self.files.get(path);
        let text = text.ok_or_else(|| "the submission does not contain it".to_owned())?;
        match text.len() <= bytes_max {
            true => Ok(text.clone()),
            false => Err(format!("it is larger than {} MiB", bytes_max >> 20)),
        }
    }

    fn statements_max(&self) -> u64 {
        STATEMENTS_MAX
    }

    fn list(
        &self,
        directory: &str,
        depth_max: usize,
        enters: &dyn Fn(&str) -> bool,
    ) -> Result<Vec<ListedEntry>, String> {
        list_home(directory, |url| (self.list)(url, depth_max, enters))
    }

    fn locate(&self, _: &str) -> Result<LocatedFile, String> {
        Err(NO_PROGRAMS.to_owned())
    }
}

fn list_home(
    directory: &str,
    list: impl Fn(&Url) -> Result<Vec<ListedEntry>, String>,
) -> Result<Vec<ListedEntry>, String> {
    if !directory.contains("://") {
        return Err("a service lists homes only; name the files by a URL of a home".to_owned());
    }
    let url: Url = directory.parse().map_err(|error| format!("{error}"))?;
    list(&url)
}

/// Files of a submission are below its workflow, or one could replace files of the service.
fn check_relative(path: &str) -> Result<(), String> {
    let is_plain = |part: &str| !part.is_empty() && part != "." && part != "..";
    match path.split('/').all(is_plain) && !path.contains('\0') {
        true => Ok(()),
        false => Err(
            "files of a submitted workflow are below its directory; copy the file there".to_owned(),
        ),
    }
}

/// Reads a workflow with the files that it names.
pub(super) fn read_submission(path: &Path, homes: &HomeView, priority: i32) -> Result<Submission> {
    let text = input_file::read_text(path, FILE_BYTES_MAX).context("the workflow")?;
    let name = path.file_name().context("a workflow is a file")?;
    let name = name
        .to_str()
        .context("the name of the workflow is no UTF-8")?;
    let directory = path.parent().filter(|it| !it.as_os_str().is_empty());
    let sources = RecordedFiles {
        directory: directory.unwrap_or_else(|| Path::new(".")),
        homes,
        files: RefCell::default(),
        programs: RefCell::default(),
    };
    if let Err(rejected) = parse_workflow_with(name, &text, &sources) {
        let lines = rejected.diagnostics.iter().map(|it| it.with_source(&text));
        let lines: Vec<String> = lines.chain(rejected.describe_omitted()).collect();
        eprintln!("{}", terminal_text::sanitize_lines(&lines.join("\n")));
        bail!("{name} has errors; correct those listed above");
    }
    if let Some(program) = sources.programs.borrow().first() {
        bail!("the program '{program}' cannot be brought: {NO_PROGRAMS}");
    }
    Ok(Submission {
        name: name.to_owned(),
        text,
        files: sources.files.into_inner(),
        priority,
        key: RunId::random().to_string(),
    })
}

/// Whether a file could not be beside the others, or would be one of the service.
fn is_path_taken(path: &str, submission: &Submission) -> bool {
    let first = path.split('/').next().unwrap_or_default();
    let own = first.strip_suffix(".new").unwrap_or(first);
    let below = path.rmatch_indices('/');
    let mut directories = below.map(|(end, _)| &path[..end]);
    path.starts_with(&submission.name)
        || path.ends_with(".json")
        || RESERVED_NAMES.contains(&own)
        || check_printable(path).is_err()
        || path.split('/').any(|part| part.len() > NAME_BYTES_MAX)
        || directories.any(|above| submission.files.contains_key(above))
}

/// The workflow of a submission. `list` lists homes with the rights of its user.
///
/// # Errors
/// `Malformed` with the first errors; `TooLarge`.
pub(super) fn parse_submission(
    submission: &Submission,
    list: &ListHome<'_>,
) -> bafs_proto::Result<Workflow> {
    let malformed = |text: String| Error::new(ErrorCode::Malformed, text);
    let name = submission.name.as_str();
    let is_reserved = [".json", ".log", ".new", ".journal", ".lock", ".commands"];
    let is_name_bad = check_relative(name).is_err()
        || check_name(name).is_err()
        || name.starts_with('-')
        || name.len() > 200
        || is_reserved.iter().any(|ending| name.ends_with(ending));
    if is_name_bad {
        return Err(malformed(format!(
            "'{}' is no name of a workflow file, such as blast.bafs",
            name.escape_debug()
        )));
    }
    for path in submission.files.keys() {
        let shown = path.escape_debug();
        check_relative(path).map_err(|why| malformed(format!("{shown}: {why}")))?;
        if is_path_taken(path, submission) {
            let text = format!("{shown}: choose another name for this file");
            return Err(malformed(text));
        }
    }
    let texts = submission.files.values().map(String::len);
    let bytes = texts.sum::<usize>() + submission.text.len();
    if submission.key.len() > KEY_BYTES_MAX {
        return Err(malformed(format!(
            "a key has {KEY_BYTES_MAX} bytes at most"
        )));
    }
    if bytes > TEXT_BYTES_MAX || submission.files.len() > FILES_MAX {
        let text = format!(
            "a submission has {} MiB of text and {FILES_MAX} files at most; use loops in place of \
             repeated text",
            TEXT_BYTES_MAX >> 20
        );
        return Err(Error::new(ErrorCode::TooLarge, text));
    }
    let files = &submission.files;
    let parsed = parse_workflow_with(name, &submission.text, &SubmittedFiles { files, list });
    parsed.map(|checked| checked.workflow).map_err(|rejected| {
        let shown = rejected.diagnostics.iter().take(3);
        let shown: Vec<String> = shown.map(ToString::to_string).collect();
        malformed(shown.join("\n"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_listing(_: &Url, _: usize, _: &dyn Fn(&str) -> bool) -> Result<Vec<ListedEntry>, String> {
        Err("nothing".to_owned())
    }

    fn refusal(name: &str, files: &[(&str, &str)]) -> Option<Error> {
        let files = files
            .iter()
            .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()));
        let submission = Submission {
            name: name.to_owned(),
            text: "job a {\nexecutable = x\n}\n".to_owned(),
            files: files.collect(),
            ..Submission::default()
        };
        parse_submission(&submission, &no_listing).err()
    }

    #[test]
    fn submission_cannot_leave_its_directory() {
        assert_eq!(refusal("w.bafs", &[("parts/a.inc", "")]), None);
        for (name, path) in [
            ("../w.bafs", "a"),
            ("a/w.bafs", "a"),
            ("share.json", "a"),
            ("w.bafs", "../a"),
            ("w.bafs", "/etc/passwd"),
            ("w.bafs", "a//b"),
            ("w.bafs", "w.bafs.journal"),
            ("w.bafs", "outcome.json"),
            ("w.bafs", "share.json/x"),
            ("w.bafs", "outcome.json.new/x"),
            ("w.bafs", "messages.log"),
            ("w.bafs", "a\nb"),
            ("w\n7 complete.bafs", "a"),
            ("w\u{202e}.bafs", "a"),
        ] {
            let refused = refusal(name, &[(path, "")]).expect(path);
            assert_eq!(refused.code, ErrorCode::Malformed, "{name} {path}");
        }
    }

    #[test]
    fn file_is_no_directory_of_another() {
        assert_eq!(refusal("w.bafs", &[("a", ""), ("ab/c", "")]), None);
        let long = format!("{}/a", "n".repeat(300));
        for files in [&[("a", ""), ("a/b/c", "")][..], &[(long.as_str(), "")]] {
            let refused = refusal("w.bafs", files).expect("it is not possible");
            assert_eq!(refused.code, ErrorCode::Malformed);
        }
    }

    #[test]
    fn programs_beside_are_refused_before_the_submission() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("count.sh"), "#!/bin/sh\n").expect("write");
        let homes = HomeView::beside(&at("w.bafs"));
        let refuse = |text: &str| {
            std::fs::write(at("w.bafs"), text).expect("write");
            let refused = read_submission(&at("w.bafs"), &homes, 0).err();
            refused.map(|error| error.to_string())
        };
        let told = refuse("job a {\nexecutable = ./count.sh\n}\n").expect("it stays here");
        assert!(
            told.contains("'count.sh'") && told.contains("put it at a home"),
            "{told}"
        );
        assert!(refuse("program c from count.sh\njob a {\nexecutable = c\n}\n").is_some());
        assert_eq!(refuse("job a {\nexecutable = ./made.sh\n}\n"), None);
    }

    #[test]
    fn service_reads_no_file_of_its_machine() {
        let submission = Submission {
            name: "w.bafs".to_owned(),
            text: "include /etc/hostname\n".to_owned(),
            ..Submission::default()
        };
        let refused = parse_submission(&submission, &no_listing).expect_err("it is not there");
        assert!(refused.detail.contains("does not contain"), "{refused}");
    }

    #[test]
    fn service_refuses_millions_of_statements() {
        let submission = Submission {
            name: "w.bafs".to_owned(),
            text: "for i in 1..2000\nfor j in 1..2000\njob a$(i).$(j) {\n executable = x\n}\n\
                   end\nend\n"
                .to_owned(),
            ..Submission::default()
        };
        let refused = parse_submission(&submission, &no_listing).expect_err("too many");
        assert!(
            refused.detail.contains("more than 500000 statements"),
            "{refused}"
        );
    }
}
