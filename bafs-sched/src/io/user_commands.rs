//! Wishes of users on their way to a scheduler: lines of a file beside the journal, which is only
//! ever appended to. Each names its run, as another may have had the journal's name before. Decides
//! nothing.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use bafs_proto::ids::RunId;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_workflow::Workflow;

use super::journal::{JournalHeader, OWNER_ONLY, restrict_to_owner};
use crate::UserCommand;

/// The file of wishes of the run with this journal.
pub fn command_path(journal: &Path) -> PathBuf {
    let mut name = journal.as_os_str().to_owned();
    name.push(".commands");
    PathBuf::from(name)
}

/// Tells the scheduler of the run with this journal and header a wish; it reads it within two
/// seconds.
///
/// # Errors
/// `ServerFault` when the file cannot be written.
pub fn send_command(journal: &Path, header: &JournalHeader, command: UserCommand) -> Result<()> {
    let path = command_path(journal);
    let (run, name) = (header.run, |job| &header.workflow.job(job).name);
    let line = match command {
        UserCommand::SetPriority { job, priority } => {
            format!("{run} prefer {} {priority}\n", name(job))
        }
        UserCommand::Cancel { job } => format!("{run} cancel {}\n", name(job)),
        UserCommand::Hold { job: Some(job) } => format!("{run} hold {}\n", name(job)),
        UserCommand::Hold { job: None } => format!("{run} hold\n"),
        UserCommand::Release { job: Some(job) } => format!("{run} release {}\n", name(job)),
        UserCommand::Release { job: None } => format!("{run} release\n"),
    };
    let mut options = OpenOptions::new();
    let open = options
        .create(true)
        .append(true)
        .mode(OWNER_ONLY)
        .open(&path);
    let written = open.and_then(|mut file| {
        restrict_to_owner(&file)?;
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
pub(crate) fn read_commands(
    journal: &Path,
    run: RunId,
    workflow: &Workflow,
    from: u64,
) -> (Vec<(u64, Option<UserCommand>)>, u64) {
    // No file, no wishes.
    let bytes = std::fs::read(command_path(journal)).unwrap_or_default();
    let end = bytes.iter().rposition(|byte| *byte == b'\n');
    let whole = String::from_utf8_lossy(&bytes[..end.unwrap_or(0)]);
    let lines = whole
        .lines()
        .skip(usize::try_from(from).unwrap_or(usize::MAX));
    let (own, mut count) = (run.to_string(), 0);
    let mut commands = Vec::new();
    for line in lines {
        count += 1;
        match line.split_once(' ') {
            Some((named, command)) if named == own => {
                commands.push((from + count, parse_command(command, workflow)));
            }
            _ => {}
        }
    }
    (commands, count)
}

fn parse_command(line: &str, workflow: &Workflow) -> Option<UserCommand> {
    let mut words = line.split(' ');
    let (verb, name) = (words.next()?, words.next());
    let job = match name {
        Some(name) => Some(find_job(workflow, name)?),
        None => None,
    };
    match (verb, job, words.next()) {
        ("prefer", Some(job), Some(priority)) => Some(UserCommand::SetPriority {
            job,
            priority: priority.parse().ok()?,
        }),
        ("cancel", Some(job), None) => Some(UserCommand::Cancel { job }),
        ("hold", job, None) => Some(UserCommand::Hold { job }),
        ("release", job, None) => Some(UserCommand::Release { job }),
        _ => None,
    }
}

/// The job of this name.
pub fn find_job(workflow: &Workflow, name: &str) -> Option<bafs_workflow::JobIndex> {
    let position = workflow.jobs.iter().position(|job| job.name == name)?;
    Some(bafs_workflow::JobIndex(u32::try_from(position).ok()?))
}

#[cfg(test)]
mod tests {
    use bafs_workflow::{JobIndex, parse_workflow};

    use super::*;
    use crate::Settings;

    fn test_header() -> JournalHeader {
        let none = |path: &str| Err(path.to_owned());
        let text = "job a {\nexecutable = x\n}\njob b {\nexecutable = x\n}\n";
        let checked = parse_workflow("w", text, &none).expect("it is right");
        JournalHeader {
            run: RunId(7),
            workflow: checked.workflow.into(),
            settings: Settings::default(),
        }
    }

    const CANCEL_COMMAND: UserCommand = UserCommand::Cancel { job: JobIndex(0) };

    #[test]
    fn commands_are_read_once_and_in_order() {
        let directory = tempfile::tempdir().expect("a directory");
        let journal = directory.path().join("journal");
        let header = test_header();
        let read = |from| read_commands(&journal, header.run, &header.workflow, from);
        assert_eq!(read(0), (Vec::new(), 0));
        let prefer = UserCommand::SetPriority {
            job: JobIndex(1),
            priority: -3,
        };
        send_command(&journal, &header, prefer).expect("it is told");
        send_command(&journal, &header, CANCEL_COMMAND).expect("it is told");
        assert_eq!(
            read(0),
            (vec![(1, Some(prefer)), (2, Some(CANCEL_COMMAND))], 2)
        );
        let run = header.run;
        let text = format!("{run} prefer a x\n{run} cancel a\n{run} cancel b");
        std::fs::write(command_path(&journal), text).expect("it is written");
        let found = vec![(1, None), (2, Some(CANCEL_COMMAND))];
        assert_eq!(
            read(0),
            (found, 2),
            "a line that is not whole does not count"
        );
        assert_eq!(read(1), (vec![(2, Some(CANCEL_COMMAND))], 1));
    }

    #[test]
    fn commands_for_another_run_are_counted_but_ignored() {
        let directory = tempfile::tempdir().expect("a directory");
        let journal = directory.path().join("journal");
        let header = test_header();
        let before = JournalHeader {
            run: RunId(6),
            ..header.clone()
        };
        send_command(&journal, &before, CANCEL_COMMAND).expect("it is told");
        let file = OpenOptions::new().append(true).open(command_path(&journal));
        let mut file = file.expect("it is there");
        file.write_all(b"\xff\n").expect("it is written");
        send_command(&journal, &header, CANCEL_COMMAND).expect("it is told");
        let found = read_commands(&journal, header.run, &header.workflow, 0);
        assert_eq!(found, (vec![(3, Some(CANCEL_COMMAND))], 3));
    }
}
