//! Wishes of users on their way to a scheduler: lines of a file beside the journal, which is only
//! ever appended to. Each names its run, as another may have had the journal's name before. Decides
//! nothing.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use bafs_proto::ids::RunId;
use bafs_proto::{Error, ErrorCode, Result};

use super::journal::{Header, OWNER_ONLY, close_to_others};
use crate::logic::Wish;
use crate::workflow::Workflow;

/// The file of wishes of the run with this journal.
pub fn path(journal: &Path) -> PathBuf {
    let mut name = journal.as_os_str().to_owned();
    name.push(".wishes");
    PathBuf::from(name)
}

/// Tells the scheduler of the run with this journal and header a wish; it reads it within two
/// seconds.
///
/// # Errors
/// `ServerFault` when the file cannot be written.
pub fn tell(journal: &Path, header: &Header, wish: Wish) -> Result<()> {
    let path = path(journal);
    let (run, name) = (header.run, |job| &header.workflow.job(job).name);
    let line = match wish {
        Wish::Prefer { job, priority } => format!("{run} prefer {} {priority}\n", name(job)),
        Wish::Cancel { job } => format!("{run} cancel {}\n", name(job)),
    };
    let mut options = OpenOptions::new();
    let open = options
        .create(true)
        .append(true)
        .mode(OWNER_ONLY)
        .open(&path);
    let written = open.and_then(|mut file| {
        close_to_others(&file)?;
        file.write_all(line.as_bytes())?;
        file.sync_all()
    });
    written.map_err(|e| {
        let text = format!("cannot write to {}: {e}", path.display());
        Error::new(ErrorCode::ServerFault, text)
    })
}

/// The wishes of a run from line `from` on, each with the number of its line counted from one, and
/// how many lines follow `from`; nothing for a line that is not understood. Lines of other runs are
/// left out. The last line counts when it is whole.
pub(crate) fn read(
    journal: &Path,
    run: RunId,
    workflow: &Workflow,
    from: u64,
) -> (Vec<(u64, Option<Wish>)>, u64) {
    // No file, no wishes.
    let bytes = std::fs::read(path(journal)).unwrap_or_default();
    let end = bytes.iter().rposition(|byte| *byte == b'\n');
    let whole = String::from_utf8_lossy(&bytes[..end.unwrap_or(0)]);
    let lines = whole
        .lines()
        .skip(usize::try_from(from).unwrap_or(usize::MAX));
    let (own, mut count) = (run.to_string(), 0);
    let mut wishes = Vec::new();
    for line in lines {
        count += 1;
        match line.split_once(' ') {
            Some((named, wish)) if named == own => {
                wishes.push((from + count, parse(wish, workflow)));
            }
            _ => {}
        }
    }
    (wishes, count)
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
    use crate::logic::Settings;
    use crate::workflow::{JobIndex, parse_workflow};

    fn header() -> Header {
        let none = |path: &str| Err(path.to_owned());
        let text = "job a {\nexecutable = x\n}\njob b {\nexecutable = x\n}\n";
        let checked = parse_workflow("w", text, &none).expect("it is right");
        Header {
            run: RunId(7),
            workflow: checked.workflow,
            settings: Settings::default(),
        }
    }

    const CANCEL: Wish = Wish::Cancel { job: JobIndex(0) };

    #[test]
    fn wishes_are_read_once_and_in_order() {
        let directory = tempfile::tempdir().expect("a directory");
        let journal = directory.path().join("journal");
        let header = header();
        let read = |from| read(&journal, header.run, &header.workflow, from);
        assert_eq!(read(0), (Vec::new(), 0));
        let prefer = Wish::Prefer {
            job: JobIndex(1),
            priority: -3,
        };
        tell(&journal, &header, prefer).expect("it is told");
        tell(&journal, &header, CANCEL).expect("it is told");
        assert_eq!(read(0), (vec![(1, Some(prefer)), (2, Some(CANCEL))], 2));
        let run = header.run;
        let text = format!("{run} prefer a x\n{run} cancel a\n{run} cancel b");
        std::fs::write(path(&journal), text).expect("it is written");
        let found = vec![(1, None), (2, Some(CANCEL))];
        assert_eq!(
            read(0),
            (found, 2),
            "a line that is not whole does not count"
        );
        assert_eq!(read(1), (vec![(2, Some(CANCEL))], 1));
    }

    #[test]
    fn wishes_for_another_run_of_that_name_are_only_counted() {
        let directory = tempfile::tempdir().expect("a directory");
        let journal = directory.path().join("journal");
        let header = header();
        let before = Header {
            run: RunId(6),
            ..header.clone()
        };
        tell(&journal, &before, CANCEL).expect("it is told");
        let file = OpenOptions::new().append(true).open(path(&journal));
        let mut file = file.expect("it is there");
        file.write_all(b"\xff\n").expect("it is written");
        tell(&journal, &header, CANCEL).expect("it is told");
        let found = read(&journal, header.run, &header.workflow, 0);
        assert_eq!(found, (vec![(3, Some(CANCEL))], 3));
    }
}
