//! Files that others include: each is read and parsed once, and none includes itself.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::ast::{SyntaxNode, Word};
use super::declarations::DeclarationBuilder;
use super::diagnostic::Diagnostics;
use super::limits::{INCLUDE_BYTES_MAX, INCLUDE_DEPTH_MAX};
use super::parse::Parser;

/// All files that were included so far, and those that are open.
pub(super) struct Includes {
    /// None for one that cannot be read, which is told once.
    known: BTreeMap<String, Option<Rc<Vec<SyntaxNode>>>>,
    /// The paths of the files whose statements are being taken, the workflow first.
    open: Vec<String>,
}

impl Includes {
    pub(super) fn new(workflow: &str) -> Self {
        Self {
            known: BTreeMap::new(),
            open: vec![workflow.to_owned()],
        }
    }

    /// The statements of a file, which counts as open from now on; none after an error.
    pub(super) fn open(
        &mut self,
        path: &str,
        at: &Word,
        declarer: &mut DeclarationBuilder<'_>,
        diagnostics: &mut Diagnostics,
    ) -> Option<Rc<Vec<SyntaxNode>>> {
        if self.open.iter().any(|open| open == path) {
            let message = format!("'{path}' includes itself");
            let chain = format!("the includes are {} -> {path}", self.open.join(" -> "));
            diagnostics.error_hint(at.location, message, chain);
            return None;
        }
        if self.open.len() > INCLUDE_DEPTH_MAX {
            let message = format!("more than {INCLUDE_DEPTH_MAX} includes inside each other");
            diagnostics.error(at.location, message);
            return None;
        }
        let nodes = match self.known.get(path) {
            Some(known) => known.clone(),
            None => {
                let nodes = read_nodes(path, at, declarer, diagnostics).map(Rc::new);
                self.known.insert(path.to_owned(), nodes.clone());
                nodes
            }
        }?;
        self.open.push(path.to_owned());
        Some(nodes)
    }

    /// The statements of the file that was opened last are taken.
    pub(super) fn close(&mut self) {
        self.open.pop();
    }
}

fn read_nodes(
    path: &str,
    at: &Word,
    declarer: &mut DeclarationBuilder<'_>,
    diagnostics: &mut Diagnostics,
) -> Option<Vec<SyntaxNode>> {
    let text = declarer.sources().read(path, INCLUDE_BYTES_MAX);
    let text = match text {
        Ok(text) if text.len() <= INCLUDE_BYTES_MAX => text,
        Ok(_) => {
            let mib = INCLUDE_BYTES_MAX >> 20;
            let message = format!("the included file '{path}' is larger than {mib} MiB");
            diagnostics.error(at.location, message);
            return None;
        }
        Err(why) => {
            let message = format!("cannot read the included file '{path}': {why}");
            let hint = "paths of includes are relative to the file that has the 'include'";
            diagnostics.error_hint(at.location, message, hint);
            return None;
        }
    };
    let file = diagnostics.add_file(path);
    declarer.add_directory(file, path);
    let mut parser = Parser::new(file, &text);
    let mut nodes = Vec::new();
    while let Some(node) = parser.next_node(diagnostics) {
        nodes.push(node);
    }
    Some(nodes)
}
