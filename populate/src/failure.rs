//! Why a volume was not filled, and whether another attempt can help: the exit codes.

use std::fmt;
use std::io;

use nix::errno::Errno;

pub type Result<T> = std::result::Result<T, Failure>;

/// What should follow a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing: with this source and this target it fails always.
    Nothing,
    /// Another attempt, on this volume.
    Again,
    /// Another attempt, on a new volume: this one has a part of the content.
    NewVolume,
}

/// The longest message, in bytes.
const MESSAGE_BYTES: usize = 1024;

/// A failure: what should follow, one word for programs, and a sentence for people.
#[derive(Clone, Debug)]
pub struct Failure {
    pub next: Next,
    /// In the form of Kubernetes' reasons, such as `ChecksumMismatch`.
    pub reason: &'static str,
    message: String,
}

impl Failure {
    pub fn new(next: Next, reason: &'static str, message: impl fmt::Display) -> Failure {
        // Names of an archive and headers of a server are in messages: nothing in them may end a
        // line or move a cursor.
        let message = message.to_string();
        let plain = message.chars().map(|c| match c {
            ' '..='~' => c,
            _ => '?',
        });
        Failure {
            next,
            reason,
            message: plain.take(MESSAGE_BYTES).collect(),
        }
    }

    pub fn refused(reason: &'static str, message: impl fmt::Display) -> Failure {
        Failure::new(Next::Nothing, reason, message)
    }

    pub fn again(reason: &'static str, message: impl fmt::Display) -> Failure {
        Failure::new(Next::Again, reason, message)
    }

    /// A failure of the target: no space is final, everything else may be gone next time.
    pub fn target(what: impl fmt::Display, error: &io::Error) -> Failure {
        let full = [Errno::ENOSPC, Errno::EDQUOT, Errno::EFBIG].map(|errno| errno as i32);
        match error.raw_os_error() {
            Some(code) if full.contains(&code) => Failure::refused(
                "TooLarge",
                format!("{what}: {error}; the content is larger than the volume"),
            ),
            _ => Failure::again("TargetFailed", format!("{what}: {error}")),
        }
    }

    /// The failure of a read through a decoder: the [`Failure`] of what the decoder reads from, or else
    /// the decoder's own, for which the content is damaged.
    pub fn content(what: &str, error: io::Error) -> Failure {
        match error.downcast::<Failure>() {
            Ok(failure) => failure,
            Err(error) => Failure::refused("Corrupt", format!("read {what}: {error}")),
        }
    }

    /// The exit code of the program.
    pub fn exit_code(&self) -> u8 {
        match self.next {
            Next::Nothing => 10,
            Next::Again => 11,
            Next::NewVolume => 12,
        }
    }

    /// The same failure of an attempt that has left a part of the content behind.
    pub fn with_partial_content(mut self) -> Failure {
        if self.next == Next::Again {
            self.next = Next::NewVolume;
        }
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_short_line_of_plain_text() {
        let hostile = format!("a\nb\x1b[2J{}", "é".repeat(5000));
        let message = Failure::refused("Refused", hostile).to_string();
        assert!(message.starts_with("a?b?[2J?"));
        assert!(message.len() <= MESSAGE_BYTES);
        assert!(message.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
    }

    #[test]
    fn a_full_volume_is_final_and_a_failing_disk_is_not() {
        let of = |errno: Errno| Failure::target("write", &io::Error::from(errno)).next;
        assert_eq!(of(Errno::ENOSPC), Next::Nothing);
        assert_eq!(of(Errno::EDQUOT), Next::Nothing);
        assert_eq!(of(Errno::EIO), Next::Again);
    }
}
