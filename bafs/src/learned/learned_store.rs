//! The file of learned values: a table of a name and a record each. Several processes use it in
//! turn, each for moments. It knows no run.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// One table: the kind of a record is the first part of its name.
const TABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("learned");

/// Another process has the file for some milliseconds.
const OPEN_TRIES_MAX: u32 = 200;
const OPEN_PAUSE: Duration = Duration::from_millis(25);

/// What to do where the file cannot be used.
const REMEDY: &str = "`bafs learned forget --all` begins anew";

/// A kind of records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Program,
    Volume,
    Node,
    Links,
}

impl Kind {
    pub(super) const ALL: [Self; 4] = [Self::Program, Self::Volume, Self::Node, Self::Links];

    /// The first part of names, with what ends it.
    pub(super) fn prefix(self) -> &'static str {
        match self {
            Self::Program => "program ",
            Self::Volume => "data ",
            Self::Node => "node ",
            Self::Links => "links ",
        }
    }

    /// The name of a record.
    pub(super) fn key(self, name: &str) -> String {
        format!("{}{name}", self.prefix())
    }
}

/// Changes of records, by their names.
#[derive(Debug, Default)]
pub(super) struct RecordChanges(BTreeMap<String, Vec<u8>>);

/// The file.
#[derive(Debug, Clone)]
pub(crate) struct LearnedStore {
    path: PathBuf,
}

impl LearnedStore {
    /// The store in a file, which need not be there.
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Records whose whole name the test accepts, in the order of names.
    pub(super) fn read_rows(
        &self,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<Vec<(String, Vec<u8>)>> {
        if !self.path.exists() {
            return Ok(Vec::new());
        }
        self.guard(|| {
            let database = self.open()?;
            let reading = database.begin_read()?;
            let table = match reading.open_table(TABLE) {
                Err(redb::TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
                table => table?,
            };
            let mut rows = Vec::new();
            for row in table.iter()? {
                let (name, value) = row?;
                if is_wanted(name.value()) {
                    rows.push((name.value().to_owned(), value.value().to_vec()));
                }
            }
            Ok(rows)
        })
    }

    /// Changes records in one transaction: `change` reads those it needs.
    pub(super) fn update(
        &self,
        change: impl Fn(&dyn Fn(&str) -> Option<Vec<u8>>) -> Result<RecordChanges>,
    ) -> Result<()> {
        if let Some(directory) = self.path.parent() {
            fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        }
        self.guard(|| {
            let database = self.open()?;
            let writing = database.begin_write()?;
            {
                let mut table = writing.open_table(TABLE)?;
                let changes = {
                    let read = |name: &str| {
                        let found = table.get(name).ok().flatten();
                        found.map(|row| row.value().to_vec())
                    };
                    change(&read)?
                };
                for (name, value) in changes.0 {
                    table.insert(name.as_str(), value.as_slice())?;
                }
            }
            writing.commit()?;
            Ok(())
        })
    }

    /// Forgets records whose whole name the test accepts; how many they were.
    pub(super) fn remove_rows(&self, is_unwanted: impl Fn(&str) -> bool) -> Result<usize> {
        if !self.path.exists() {
            return Ok(0);
        }
        let names = self.read_rows(is_unwanted)?;
        self.guard(|| {
            let database = self.open()?;
            let writing = database.begin_write()?;
            {
                let mut table = writing.open_table(TABLE)?;
                for (name, _) in &names {
                    table.remove(name.as_str())?;
                }
            }
            writing.commit()?;
            Ok(names.len())
        })
    }

    /// Forgets everything, whatever the file is like.
    pub(super) fn remove_all(&self) -> Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", self.path.display()))
            }
            _ => Ok(()),
        }
    }

    fn open(&self) -> Result<Database> {
        for _ in 0..OPEN_TRIES_MAX {
            match Database::create(&self.path) {
                Err(DatabaseError::DatabaseAlreadyOpen) => std::thread::sleep(OPEN_PAUSE),
                database => return Ok(database?),
            }
        }
        Err(anyhow!("other processes use it all the time"))
    }

    /// The library panics at some damaged files.
    fn guard<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let failed = || format!("the learned values in {}; {REMEDY}", self.path.display());
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(done) => done.with_context(failed),
            Err(_) => Err(anyhow!("the file is damaged")).with_context(failed),
        }
    }
}

impl RecordChanges {
    /// Changes a record that is there, or a new one.
    pub(super) fn change<T: DeserializeOwned + Default + Serialize>(
        &mut self,
        name: &str,
        read: &dyn Fn(&str) -> Option<Vec<u8>>,
        change: impl FnOnce(&mut T),
    ) -> Result<()> {
        let bytes = self.0.get(name).cloned().or_else(|| read(name));
        let mut record: T = bytes
            .and_then(|it| serde_json::from_slice(&it).ok())
            .unwrap_or_default();
        change(&mut record);
        self.0.insert(name.to_owned(), serde_json::to_vec(&record)?);
        Ok(())
    }
}
