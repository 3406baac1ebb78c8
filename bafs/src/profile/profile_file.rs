//! The file of a profile: one trace in each line, as JSON.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, Result};
use bafs_profile::trace::Trace;

use crate::input_file::open_regular;

/// The traces of a profile; none if there is no such file.
pub(super) fn read_traces(path: &Path) -> Result<Vec<Trace>> {
    match path.metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        _ => {}
    }
    let lines = BufReader::new(open_regular(path)?).lines();
    let parse = |(at, line): (usize, std::io::Result<String>)| {
        let shown = path.display();
        let line = line.with_context(|| format!("cannot read {shown}"))?;
        serde_json::from_str(&line).with_context(|| {
            let number = at + 1;
            format!("{shown}: line {number} is no trace; name a profile, or use --new")
        })
    };
    lines.enumerate().map(parse).collect()
}

/// Adds own traces to a profile, and returns all that it has then. `earlier` are those that it had
/// when the commands started; without them it begins anew. Commands that run at the same time may
/// have added theirs, perhaps under one of the instances of `numbered`, which get another number.
pub(super) fn add_traces(
    path: &Path,
    earlier: Option<Vec<Trace>>,
    mut own: Vec<Trace>,
    numbered: &BTreeSet<String>,
) -> Result<Vec<Trace>> {
    let failed = || format!("cannot write {}", path.display());
    let directory = match path.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    };
    // The file itself is replaced, so that its lock would be that of an old file.
    let lock = File::open(directory).with_context(failed)?;
    lock.lock().with_context(failed)?;
    let Some(earlier) = earlier else {
        write_traces(path, directory, &own).with_context(failed)?;
        return Ok(own);
    };
    let mut traces = read_traces(path)?;
    let is_added = |name: &str| {
        traces
            .iter()
            .skip(earlier.len())
            .any(|it| it.instance == name)
    };
    let taken: Vec<_> = numbered.iter().filter(|name| is_added(name)).collect();
    for name in taken {
        let free = next_instance(traces.iter().chain(&own));
        let renamed = own.iter_mut().filter(|trace| trace.instance == *name);
        renamed.for_each(|trace| trace.instance.clone_from(&free));
    }
    traces.append(&mut own);
    write_traces(path, directory, &traces).with_context(failed)?;
    Ok(traces)
}

/// Replaces a profile as a whole.
fn write_traces(path: &Path, directory: &Path, traces: &[Trace]) -> Result<()> {
    let mut writer = BufWriter::new(tempfile::NamedTempFile::new_in(directory)?);
    for trace in traces {
        serde_json::to_writer(&mut writer, trace)?;
        writer.write_all(b"\n")?;
    }
    let new = writer.into_inner().map_err(|error| error.into_error())?;
    new.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// A name for an instance that no trace has.
pub(super) fn next_instance<'t>(traces: impl IntoIterator<Item = &'t Trace>) -> String {
    let taken: BTreeSet<&str> = traces.into_iter().map(|it| it.instance.as_str()).collect();
    let mut names = (1_usize..).map(|number| number.to_string());
    names
        .find(|name| !taken.contains(name.as_str()))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(instance: &str) -> Trace {
        Trace {
            instance: instance.to_owned(),
            ..Trace::default()
        }
    }

    #[test]
    fn traces_of_simultaneous_commands_are_kept() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("p");
        let numbered = BTreeSet::from(["1".to_owned()]);
        let add = |name: &str| {
            add_traces(&path, Some(Vec::new()), vec![trace(name)], &numbered).expect("a profile")
        };
        add("1");
        add("a");
        let names: Vec<_> = add("1").into_iter().map(|it| it.instance).collect();
        assert_eq!(names, ["1", "a", "2"]);
        assert_eq!(read_traces(&path).expect("a profile").len(), 3);
    }
}
