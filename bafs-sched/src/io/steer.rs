//! Wishes of users on their way to a scheduler: lines of a file beside the journal, which is only
//! ever appended to. Decides nothing.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use bafs_proto::{Error, ErrorCode, Result};

use crate::logic::Wish;
use crate::workflow::Workflow;

/// The file of wishes of the run with this journal.
pub fn path(journal: &Path) -> PathBuf {
    let mut name = journal.as_os_str().to_owned();
    name.push(".wishes");
    PathBuf::from(name)
}

/// Tells the scheduler of a run a wish; it reads it within two seconds.
///
/// # Errors
/// `ServerFault` when the file cannot be written.
pub fn tell(journal: &Path, workflow: &Workflow, wish: Wish) -> Result<()> {
    let path = path(journal);
    let name = |job| &workflow.job(job).name;
    let line = match wish {
        Wish::Prefer { job, priority } => format!("prefer {} {priority}\n", name(job)),
        Wish::Cancel { job } => format!("cancel {}\n", name(job)),
    };
    let open = OpenOptions::new().create(true).append(true).open(&path);
    let written = open.and_then(|mut file| {
        file.write_all(line.as_bytes())?;
        file.sync_all()
    });
    written.map_err(|e| {
        let text = format!("cannot write to {}: {e}", path.display());
        Error::new(ErrorCode::ServerFault, text)
    })
}

/// The wishes of a run from number `from` on; nothing for a line that is not understood. The last
/// line counts when it is whole.
pub(crate) fn read(journal: &Path, workflow: &Workflow, from: u64) -> Vec<Option<Wish>> {
    // No file, no wishes.
    let text = std::fs::read_to_string(path(journal)).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let lines = whole
        .lines()
        .skip(usize::try_from(from).unwrap_or(usize::MAX));
    lines.map(|line| parse(line, workflow)).collect()
}

fn parse(line: &str, workflow: &Workflow) -> Option<Wish> {
    let mut words = line.split(' ');
    let (verb, name) = (words.next()?, words.next()?);
    let job = find(workflow, name)?;
    match (verb, words.next()) {
        ("prefer", Some(priority)) => Some(Wish::Prefer {
            job,
            priority: priority.parse().ok()?,
        }),
        ("cancel", None) => Some(Wish::Cancel { job }),
        _ => None,
    }
}

/// The job of this name.
pub fn find(workflow: &Workflow, name: &str) -> Option<crate::workflow::JobIndex> {
    let position = workflow.jobs.iter().position(|job| job.name == name)?;
    Some(crate::workflow::JobIndex(u32::try_from(position).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workflow::{JobIndex, parse_workflow};

    #[test]
    fn wishes_are_read_once_and_in_order() {
        let directory = tempfile::tempdir().expect("a directory");
        let journal = directory.path().join("journal");
        let none = |path: &str| Err(path.to_owned());
        let text = "job a {\nexecutable = x\n}\njob b {\nexecutable = x\n}\n";
        let workflow = parse_workflow("w", text, &none)
            .expect("it is right")
            .workflow;
        assert!(read(&journal, &workflow, 0).is_empty());
        let prefer = Wish::Prefer {
            job: JobIndex(1),
            priority: -3,
        };
        let cancel = Wish::Cancel { job: JobIndex(0) };
        tell(&journal, &workflow, prefer).expect("it is told");
        tell(&journal, &workflow, cancel).expect("it is told");
        assert_eq!(read(&journal, &workflow, 0), [Some(prefer), Some(cancel)]);
        std::fs::write(path(&journal), "prefer a x\ncancel a\ncancel b").expect("it is written");
        let found = read(&journal, &workflow, 0);
        assert_eq!(
            found,
            [None, Some(cancel)],
            "a line that is not whole does not count"
        );
        assert_eq!(read(&journal, &workflow, 1), [Some(cancel)]);
    }
}
