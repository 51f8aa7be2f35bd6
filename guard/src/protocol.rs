//! The protocol between driver and guard: messages of a fixed size, over a socket that preserves
//! message boundaries. One connection is one freeze session; when it ends, everything in it is
//! thawed.
//!
//! Driver and guard are usually of the same release; the version number matters only during an
//! update.

use std::time::Duration;

use nix::errno::Errno;

pub use slackwater_core::host::linux::seqpacket::MESSAGE;

/// Version of this protocol.
const VERSION: u32 = 1;

/// Maximum number of file systems in one session: all descriptors are sent in one message (the
/// kernel's SCM_MAX_FD is 253), and each needs a thread in the guard.
pub const MOST_MEMBERS: usize = 128;

/// A message from the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// The first message, with the roots of `members` file systems and the lock of the journal
    /// entry.
    Begin {
        /// Number of file systems.
        members: u32,
        /// Time limit from the first FIFREEZE until everything is thawed.
        freeze: Duration,
        /// Whether grace periods are expedited during the freeze.
        expedite: bool,
    },
    /// syncfs of all members.
    Sync,
    /// FIFREEZE of all members.
    Freeze,
    /// FITHAW of one member.
    Thaw(u32),
    /// Checks that the guard is alive: a FIFREEZE that hangs is not the guard's fault.
    Ping,
    /// Thaw all members and end the session; pings are answered until then.
    End,
}

/// A message from the guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Say {
    /// The guard has received everything and started a thread for each member; or it could not (an
    /// errno).
    Ready(i32),
    /// syncfs of a member returned this errno, or 0.
    Synced(u32, i32),
    /// FIFREEZE of a member returned this errno, or 0.
    Frozen(u32, i32),
    /// A member is not frozen by this session any more.
    Thawed {
        /// The index of the member.
        member: u32,
        /// The errno of FITHAW, or 0.
        errno: i32,
        /// It was thawed without a request: at the deadline, at the guard's exit, or after another
        /// member's failure.
        early: bool,
    },
    /// The answer to a ping.
    Pong,
    /// The session has ended normally: nothing of it is frozen, or can become frozen.
    Bye,
}

fn message(words: [u32; 4], long: u64) -> [u8; MESSAGE] {
    let mut bytes = [0; MESSAGE];
    bytes[..4].copy_from_slice(&VERSION.to_le_bytes());
    for (at, word) in words.iter().enumerate() {
        bytes[4 + at * 4..8 + at * 4].copy_from_slice(&word.to_le_bytes());
    }
    bytes[24..].copy_from_slice(&long.to_le_bytes());
    bytes
}

fn words(bytes: &[u8; MESSAGE]) -> Option<([u32; 4], u64)> {
    let word =
        |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let long = u64::from(word(24)) | u64::from(word(28)) << 32;
    (word(0) == VERSION).then(|| ([word(4), word(8), word(12), word(16)], long))
}

impl Ask {
    pub fn encode(self) -> [u8; MESSAGE] {
        match self {
            Ask::Begin {
                members,
                freeze,
                expedite,
            } => {
                let nanos = u64::try_from(freeze.as_nanos()).unwrap_or(u64::MAX);
                message([1, members, u32::from(expedite), 0], nanos)
            }
            Ask::Sync => message([2, 0, 0, 0], 0),
            Ask::Freeze => message([3, 0, 0, 0], 0),
            Ask::Thaw(member) => message([4, member, 0, 0], 0),
            Ask::Ping => message([5, 0, 0, 0], 0),
            Ask::End => message([6, 0, 0, 0], 0),
        }
    }

    /// Decodes a message; `None` if it is invalid.
    pub fn decode(bytes: &[u8; MESSAGE]) -> Option<Ask> {
        let ([kind, member, expedite, _], nanos) = words(bytes)?;
        match kind {
            1 => Some(Ask::Begin {
                members: member,
                freeze: Duration::from_nanos(nanos),
                expedite: expedite != 0,
            }),
            2 => Some(Ask::Sync),
            3 => Some(Ask::Freeze),
            4 => Some(Ask::Thaw(member)),
            5 => Some(Ask::Ping),
            6 => Some(Ask::End),
            _ => None,
        }
    }
}

impl Say {
    pub fn encode(self) -> [u8; MESSAGE] {
        let code = |errno: i32| errno.unsigned_abs();
        match self {
            Say::Ready(errno) => message([1, 0, code(errno), 0], 0),
            Say::Synced(member, errno) => message([2, member, code(errno), 0], 0),
            Say::Frozen(member, errno) => message([3, member, code(errno), 0], 0),
            Say::Thawed {
                member,
                errno,
                early,
            } => message([4, member, code(errno), u32::from(early)], 0),
            Say::Pong => message([5, 0, 0, 0], 0),
            Say::Bye => message([6, 0, 0, 0], 0),
        }
    }

    /// Decodes a message; `None` if it is invalid.
    pub fn decode(bytes: &[u8; MESSAGE]) -> Option<Say> {
        let ([kind, member, errno, early], _) = words(bytes)?;
        let errno = i32::try_from(errno).ok()?;
        match kind {
            1 => Some(Say::Ready(errno)),
            2 => Some(Say::Synced(member, errno)),
            3 => Some(Say::Frozen(member, errno)),
            4 => Some(Say::Thawed {
                member,
                errno,
                early: early != 0,
            }),
            5 => Some(Say::Pong),
            6 => Some(Say::Bye),
            _ => None,
        }
    }
}

/// The errno of a result, 0 for success.
pub fn code(answer: Result<(), Errno>) -> i32 {
    answer.err().map_or(0, |errno| errno as i32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn asks() -> impl Strategy<Value = Ask> {
        prop_oneof![
            (any::<u32>(), any::<u64>(), any::<bool>()).prop_map(|(members, nanos, expedite)| {
                Ask::Begin {
                    members,
                    freeze: Duration::from_nanos(nanos),
                    expedite,
                }
            }),
            Just(Ask::Sync),
            Just(Ask::Freeze),
            any::<u32>().prop_map(Ask::Thaw),
            Just(Ask::Ping),
            Just(Ask::End),
        ]
    }

    fn says() -> impl Strategy<Value = Say> {
        let errno = 0..4096i32;
        prop_oneof![
            errno.clone().prop_map(Say::Ready),
            (any::<u32>(), errno.clone()).prop_map(|(member, errno)| Say::Synced(member, errno)),
            (any::<u32>(), errno.clone()).prop_map(|(member, errno)| Say::Frozen(member, errno)),
            (any::<u32>(), errno, any::<bool>()).prop_map(|(member, errno, early)| Say::Thawed {
                member,
                errno,
                early,
            }),
            Just(Say::Pong),
            Just(Say::Bye),
        ]
    }

    proptest! {
        #[test]
        fn messages_arrive_unchanged(ask in asks(), say in says()) {
            prop_assert_eq!(Ask::decode(&ask.encode()), Some(ask));
            prop_assert_eq!(Say::decode(&say.encode()), Some(say));
        }

        #[test]
        fn an_invalid_message_is_refused(bytes in any::<[u8; MESSAGE]>()) {
            let another_version = bytes[..4] != VERSION.to_le_bytes();
            prop_assert!(!another_version || Ask::decode(&bytes).is_none());
            prop_assert!(!another_version || Say::decode(&bytes).is_none());
        }
    }

    /// A message that is accepted says exactly what its encoding says.
    fn fuzz_messages<T: Copy + PartialEq + std::fmt::Debug>(
        name: &str,
        messages: &[T],
        encode: impl Fn(T) -> [u8; MESSAGE],
        decode: impl Fn(&[u8; MESSAGE]) -> Option<T>,
    ) {
        let seeds: Vec<Vec<u8>> = messages.iter().map(|one| encode(*one).to_vec()).collect();
        let read = |bytes: &[u8]| decode(bytes.try_into().ok()?);
        let target = |bytes: &[u8]| {
            if let Some(message) = read(bytes) {
                assert_eq!(read(&encode(message)), Some(message));
            }
        };
        slackwater_core::fuzz::fuzz(name, &seeds, target, |bytes| {
            assert!(read(bytes).is_none_or(|message| messages.contains(&message)));
        });
    }

    #[test]
    fn fuzz_requests() {
        let freeze = Duration::from_millis(500);
        let requests = [
            Ask::Begin {
                members: 3,
                freeze,
                expedite: true,
            },
            Ask::Freeze,
            Ask::Thaw(2),
            Ask::End,
        ];
        fuzz_messages("guard requests", &requests, Ask::encode, Ask::decode);
    }

    #[test]
    fn fuzz_answers() {
        let answers = [
            Say::Ready(0),
            Say::Frozen(1, 16),
            Say::Thawed {
                member: 1,
                errno: 0,
                early: true,
            },
            Say::Bye,
        ];
        fuzz_messages("guard answers", &answers, Say::encode, Say::decode);
    }
}
