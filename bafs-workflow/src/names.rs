//! The names of jobs and volumes: each declared once, found again, and guessed when misspelled. It
//! does not know what they name.

use std::collections::BTreeMap;
use std::ops::Bound;

use super::ast::Word;
use super::diagnostic::{Diagnostics, SourceLocation};
use super::limits::NEAREST_CANDIDATES_MAX;
use super::spelling::find_nearest;

/// The names of one kind, in the order of declaration.
pub(super) struct NameTable {
    kind: &'static str,
    indices: BTreeMap<String, u32>,
    locations: Vec<SourceLocation>,
}

impl NameTable {
    pub(super) fn new(what: &'static str) -> Self {
        Self {
            kind: what,
            indices: BTreeMap::new(),
            locations: vec![],
        }
    }

    /// Gives the name the next index; false when it is taken.
    pub(super) fn declare(&mut self, name: &Word, diagnostics: &mut Diagnostics) -> bool {
        let next = self.locations.len() as u32;
        let index = *self.indices.entry(name.text.clone()).or_insert(next);
        if index == next {
            self.locations.push(name.location);
            return true;
        }
        if diagnostics.has_room_for_error(name.location) {
            let first = self.locations[index as usize];
            let what = self.kind;
            let message = format!(
                "{what} '{}' is declared twice, first in {}",
                name.text,
                diagnostics.describe_location(first)
            );
            let hint = match (name.location.is_in_loop, first.line == name.location.line) {
                (true, true) => "use the loop variable in the name, such as a$(i)",
                _ => "give it another name",
            };
            diagnostics.error_hint(name.location, message, hint);
        } else {
            diagnostics.error(name.location, "declared twice");
        }
        false
    }

    /// Where each name is declared.
    pub(super) fn locations(&self) -> &[SourceLocation] {
        &self.locations
    }

    /// The index of a name. An unknown one is an error, unless names may be missing for an error
    /// that was reported already.
    pub(super) fn find(
        &self,
        name: &Word,
        may_be_missing: bool,
        diagnostics: &mut Diagnostics,
    ) -> Option<u32> {
        let found = self.indices.get(&name.text).copied();
        if found.is_none() && !may_be_missing {
            self.report_unknown(name, diagnostics);
        }
        found
    }

    fn report_unknown(&self, name: &Word, diagnostics: &mut Diagnostics) {
        let what = self.kind;
        let message = format!("unknown {what} '{}'", name.text);
        if !diagnostics.has_room_for_error(name.location) {
            return diagnostics.error(name.location, message);
        }
        // Neighbours in the alphabet only: in a million names most slips are near the end.
        let text = name.text.as_str();
        let after = self
            .indices
            .range::<str, _>((Bound::Included(text), Bound::Unbounded));
        let before = self
            .indices
            .range::<str, _>((Bound::Unbounded, Bound::Excluded(text)))
            .rev();
        let half = NEAREST_CANDIDATES_MAX / 2;
        let candidates = before
            .take(half)
            .chain(after.take(half))
            .map(|(known, _)| known.as_str());
        let hint = match find_nearest(&name.text, candidates) {
            Some(near) => format!("did you mean '{near}'?"),
            None if what == "job" => "declare it with 'job NAME FILE'".to_owned(),
            None => "declare it with 'volume NAME scratch SIZE'".to_owned(),
        };
        diagnostics.error_hint(name.location, message, hint);
    }
}
