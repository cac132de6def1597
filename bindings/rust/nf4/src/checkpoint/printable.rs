//! Text of a file in messages: its control characters must not control a terminal.

use std::fmt::{self, Display, Write};

/// Displays control characters, and marks that turn the direction of text, as escapes.
pub(super) struct Printable<T>(pub T);

struct Escaping<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl<T: Display> Display for Printable<T> {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escaping(to), "{}", self.0)
    }
}

impl Write for Escaping<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.chars().try_for_each(|c| match c {
            '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                write!(self.0, "{}", c.escape_unicode())
            }
            c if c.is_control() => write!(self.0, "{}", c.escape_default()),
            c => self.0.write_char(c),
        })
    }
}
