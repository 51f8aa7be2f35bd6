//! The protocol between driver and guard: messages of a fixed size, over a socket that preserves
//! message boundaries. One connection is one session; when it ends, everything in it is resumed and
//! thawed.
//!
//! Driver and guard are usually of the same release; the version number matters only during an
//! update. A session has the lowest version that it needs, and the guard answers in the version in
//! which it was asked. So a session without mapped devices works with a guard, and with a driver, of
//! a release that does not know them.

use std::time::Duration;

use nix::errno::Errno;

pub use slackwater_core::host::linux::seqpacket::MESSAGE_BYTES;

/// The version of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// All members are file systems.
    One = 1,
    /// Members may have mapped devices.
    Two = 2,
}

/// Maximum number of members in one session: each needs a thread in the guard.
pub const MAX_MEMBERS: usize = 128;
/// Maximum number of descriptors of all members together. They are sent in one message with the
/// lock of the journal entry, and the kernel's SCM_MAX_FD is 253.
pub const MAX_DESCRIPTORS: usize = 252;

/// The length of [`Request::Begin`] in [`Version::Two`]: the message, and two bits for each member.
pub const LONG_MESSAGE_BYTES: usize = MESSAGE_BYTES + MAX_MEMBERS / 4;

/// Which descriptors of a member follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passed {
    /// The root directory of its file system.
    Root = 1,
    /// Its mapped device.
    Mapped = 2,
    /// The root directory, and then the mapped device.
    Both = 3,
}

impl Passed {
    /// How many descriptors these are.
    pub fn count(self) -> usize {
        match self {
            Passed::Root | Passed::Mapped => 1,
            Passed::Both => 2,
        }
    }
}

/// Encodes [`Request::Begin`] of [`Version::Two`].
pub fn encode_long(begin: Request, passed: &[Passed]) -> [u8; LONG_MESSAGE_BYTES] {
    let mut bytes = [0; LONG_MESSAGE_BYTES];
    bytes[..MESSAGE_BYTES].copy_from_slice(&begin.encode(Version::Two));
    for (at, passed) in passed.iter().enumerate().take(MAX_MEMBERS) {
        bytes[MESSAGE_BYTES + at / 4] |= (*passed as u8) << (at % 4 * 2);
    }
    bytes
}

/// Which descriptors of each member follow a message of [`Version::Two`]; `None` if that is invalid.
pub fn decode_passed(bytes: &[u8; LONG_MESSAGE_BYTES], members: usize) -> Option<Vec<Passed>> {
    let of = |at: usize| match bytes[MESSAGE_BYTES + at / 4] >> (at % 4 * 2) & 3 {
        1 => Some(Passed::Root),
        2 => Some(Passed::Mapped),
        3 => Some(Passed::Both),
        _ => None,
    };
    let is_rest_empty = (members..MAX_MEMBERS).all(|at| of(at).is_none());
    let is_valid = members <= MAX_MEMBERS && is_rest_empty;
    is_valid.then(|| (0..members).map(of).collect())?
}

/// A message from the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// The first message, with the descriptors of `members` members and the lock of the journal
    /// entry.
    Begin {
        members: u32,
        /// Time limit from the first FIFREEZE until everything is resumed and thawed.
        freeze: Duration,
        /// Whether grace periods are expedited during the freeze.
        expedite: bool,
    },
    /// syncfs of all members.
    Sync,
    /// FIFREEZE of all members, and then the suspend of all mapped devices.
    Freeze,
    /// Resume of the mapped device of one member, and then its FITHAW.
    Thaw(u32),
    /// Checks that the guard is alive: a FIFREEZE that hangs is not the guard's fault.
    Ping,
    /// Resume and thaw all members and end the session; pings are answered until then.
    End,
}

/// A message from the guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The guard has received everything and started a thread for each member; or it could not (an
    /// errno).
    Ready(i32),
    /// syncfs of a member returned this errno, or 0.
    Synced(u32, i32),
    /// FIFREEZE of a member returned this errno, or 0, also if it has no file system.
    Frozen(u32, i32),
    /// The suspend of a member's mapped device returned this errno, or 0.
    Suspended(u32, i32),
    /// A member is neither suspended nor frozen by this session any more.
    Thawed {
        /// The index of the member.
        member: u32,
        /// The errno of the resume or of FITHAW, or 0. EINVAL if another program had resumed or
        /// thawed it before.
        errno: i32,
        /// It was resumed and thawed without a request: at the deadline, at the guard's exit, or after another
        /// member's failure.
        early: bool,
    },
    /// The answer to a ping.
    Pong,
    /// The session has ended normally: nothing of it is frozen, or can become frozen.
    Ended,
}

fn message(version: Version, words: [u32; 4], long: u64) -> [u8; MESSAGE_BYTES] {
    let mut bytes = [0; MESSAGE_BYTES];
    bytes[..4].copy_from_slice(&(version as u32).to_le_bytes());
    for (at, word) in words.iter().enumerate() {
        bytes[4 + at * 4..8 + at * 4].copy_from_slice(&word.to_le_bytes());
    }
    bytes[24..].copy_from_slice(&long.to_le_bytes());
    bytes
}

fn words(bytes: &[u8; MESSAGE_BYTES]) -> Option<(Version, [u32; 4], u64)> {
    let word =
        |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let long = u64::from(word(24)) | u64::from(word(28)) << 32;
    let version = match word(0) {
        1 => Version::One,
        2 => Version::Two,
        _ => return None,
    };
    Some((version, [word(4), word(8), word(12), word(16)], long))
}

impl Request {
    pub fn encode(self, version: Version) -> [u8; MESSAGE_BYTES] {
        let message = |words, long| message(version, words, long);
        match self {
            Request::Begin {
                members,
                freeze,
                expedite,
            } => {
                let nanos = u64::try_from(freeze.as_nanos()).unwrap_or(u64::MAX);
                message([1, members, u32::from(expedite), 0], nanos)
            }
            Request::Sync => message([2, 0, 0, 0], 0),
            Request::Freeze => message([3, 0, 0, 0], 0),
            Request::Thaw(member) => message([4, member, 0, 0], 0),
            Request::Ping => message([5, 0, 0, 0], 0),
            Request::End => message([6, 0, 0, 0], 0),
        }
    }

    /// Decodes a message; `None` if it is invalid.
    pub fn decode(bytes: &[u8; MESSAGE_BYTES]) -> Option<(Version, Request)> {
        let (version, [kind, member, expedite, _], nanos) = words(bytes)?;
        let request = match kind {
            1 => Request::Begin {
                members: member,
                freeze: Duration::from_nanos(nanos),
                expedite: expedite != 0,
            },
            2 => Request::Sync,
            3 => Request::Freeze,
            4 => Request::Thaw(member),
            5 => Request::Ping,
            6 => Request::End,
            _ => return None,
        };
        Some((version, request))
    }
}

impl Reply {
    pub fn encode(self, version: Version) -> [u8; MESSAGE_BYTES] {
        let message = |words, long| message(version, words, long);
        let code = |errno: i32| errno.unsigned_abs();
        match self {
            Reply::Ready(errno) => message([1, 0, code(errno), 0], 0),
            Reply::Synced(member, errno) => message([2, member, code(errno), 0], 0),
            Reply::Frozen(member, errno) => message([3, member, code(errno), 0], 0),
            Reply::Thawed {
                member,
                errno,
                early,
            } => message([4, member, code(errno), u32::from(early)], 0),
            Reply::Pong => message([5, 0, 0, 0], 0),
            Reply::Ended => message([6, 0, 0, 0], 0),
            Reply::Suspended(member, errno) => message([7, member, code(errno), 0], 0),
        }
    }

    /// Decodes a message; `None` if it is invalid.
    pub fn decode(bytes: &[u8; MESSAGE_BYTES]) -> Option<(Version, Reply)> {
        let (version, [kind, member, errno, early], _) = words(bytes)?;
        let errno = i32::try_from(errno).ok()?;
        let reply = match kind {
            1 => Reply::Ready(errno),
            2 => Reply::Synced(member, errno),
            3 => Reply::Frozen(member, errno),
            4 => Reply::Thawed {
                member,
                errno,
                early: early != 0,
            },
            5 => Reply::Pong,
            6 => Reply::Ended,
            7 => Reply::Suspended(member, errno),
            _ => return None,
        };
        Some((version, reply))
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

    fn asks() -> impl Strategy<Value = Request> {
        prop_oneof![
            (any::<u32>(), any::<u64>(), any::<bool>()).prop_map(|(members, nanos, expedite)| {
                Request::Begin {
                    members,
                    freeze: Duration::from_nanos(nanos),
                    expedite,
                }
            }),
            Just(Request::Sync),
            Just(Request::Freeze),
            any::<u32>().prop_map(Request::Thaw),
            Just(Request::Ping),
            Just(Request::End),
        ]
    }

    fn says() -> impl Strategy<Value = Reply> {
        let errno = 0..4096i32;
        prop_oneof![
            errno.clone().prop_map(Reply::Ready),
            (any::<u32>(), errno.clone()).prop_map(|(member, errno)| Reply::Synced(member, errno)),
            (any::<u32>(), errno.clone()).prop_map(|(member, errno)| Reply::Frozen(member, errno)),
            (any::<u32>(), errno.clone())
                .prop_map(|(member, errno)| Reply::Suspended(member, errno)),
            (any::<u32>(), errno, any::<bool>()).prop_map(|(member, errno, early)| Reply::Thawed {
                member,
                errno,
                early,
            }),
            Just(Reply::Pong),
            Just(Reply::Ended),
        ]
    }

    fn versions() -> impl Strategy<Value = Version> {
        prop_oneof![Just(Version::One), Just(Version::Two)]
    }

    fn passed() -> impl Strategy<Value = Passed> {
        prop_oneof![Just(Passed::Root), Just(Passed::Mapped), Just(Passed::Both)]
    }

    proptest! {
        #[test]
        fn messages_arrive_unchanged(request in asks(), reply in says(), version in versions()) {
            prop_assert_eq!(Request::decode(&request.encode(version)), Some((version, request)));
            prop_assert_eq!(Reply::decode(&reply.encode(version)), Some((version, reply)));
        }

        #[test]
        fn an_invalid_message_is_refused(bytes in any::<[u8; MESSAGE_BYTES]>()) {
            let another_version = !(1..=2).contains(&bytes[0]) || bytes[1..4] != [0; 3];
            prop_assert!(!another_version || Request::decode(&bytes).is_none());
            prop_assert!(!another_version || Reply::decode(&bytes).is_none());
        }

        #[test]
        fn the_kinds_of_descriptors_arrive_unchanged(
            passed in prop::collection::vec(passed(), 0..=MAX_MEMBERS)
        ) {
            let bytes = encode_long(Request::Sync, &passed);
            let members = passed.len();
            prop_assert_eq!(decode_passed(&bytes, members), Some(passed));
            prop_assert_eq!(decode_passed(&bytes, members + 1), None);
            if members > 0 {
                prop_assert_eq!(decode_passed(&bytes, members - 1), None);
            }
        }
    }

    /// The bytes in hexadecimal, without spaces.
    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The versions, with the bytes with which each of their messages begins.
    const VERSIONS: [(Version, &str); 2] = [(Version::One, "01000000"), (Version::Two, "02000000")];

    const BEGIN: Request = Request::Begin {
        members: 3,
        freeze: Duration::from_secs(10),
        expedite: true,
    };

    /// Programs of earlier releases send and expect exactly these bytes.
    #[test]
    fn requests_keep_their_bytes() {
        let requests = [
            (
                BEGIN,
                "01000000 03000000 01000000 00000000 00000000 00e40b5402000000",
            ),
            (
                Request::Sync,
                "02000000 00000000 00000000 00000000 00000000 0000000000000000",
            ),
            (
                Request::Freeze,
                "03000000 00000000 00000000 00000000 00000000 0000000000000000",
            ),
            (
                Request::Thaw(258),
                "04000000 02010000 00000000 00000000 00000000 0000000000000000",
            ),
            (
                Request::Ping,
                "05000000 00000000 00000000 00000000 00000000 0000000000000000",
            ),
            (
                Request::End,
                "06000000 00000000 00000000 00000000 00000000 0000000000000000",
            ),
        ];
        for (version, first) in VERSIONS {
            for (request, rest) in requests {
                let expected = format!("{first}{}", rest.replace(' ', ""));
                assert_eq!(hex(&request.encode(version)), expected, "{request:?}");
            }
        }
    }

    /// The same of replies.
    #[test]
    fn replies_keep_their_bytes() {
        let replies = [
            (Reply::Ready(12), "01000000 00000000 0c000000 00000000"),
            (Reply::Synced(258, 5), "02000000 02010000 05000000 00000000"),
            (
                Reply::Frozen(258, 16),
                "03000000 02010000 10000000 00000000",
            ),
            (
                Reply::Thawed {
                    member: 258,
                    errno: 22,
                    early: true,
                },
                "04000000 02010000 16000000 01000000",
            ),
            (Reply::Pong, "05000000 00000000 00000000 00000000"),
            (Reply::Ended, "06000000 00000000 00000000 00000000"),
            (
                Reply::Suspended(258, 4),
                "07000000 02010000 04000000 00000000",
            ),
        ];
        for (version, first) in VERSIONS {
            for (reply, words) in replies {
                let expected = format!("{first}{}{}", words.replace(' ', ""), "0".repeat(24));
                assert_eq!(hex(&reply.encode(version)), expected, "{reply:?}");
            }
        }
    }

    /// The same of the long message, whose members have a root, a mapped device, or both.
    #[test]
    fn the_long_message_keeps_its_bytes() {
        let passed = [
            Passed::Root,
            Passed::Mapped,
            Passed::Both,
            Passed::Root,
            Passed::Mapped,
        ];
        let begin = hex(&BEGIN.encode(Version::Two));
        let expected = format!("{begin}7902{}", "0".repeat(60));
        assert_eq!(hex(&encode_long(BEGIN, &passed)), expected);
    }

    /// A message that is accepted says exactly what its encoding says.
    fn fuzz_messages<T: Copy + PartialEq + std::fmt::Debug>(
        name: &str,
        messages: &[T],
        encode: impl Fn(Version, T) -> [u8; MESSAGE_BYTES],
        decode: impl Fn(&[u8; MESSAGE_BYTES]) -> Option<(Version, T)>,
    ) {
        let seeds = [Version::One, Version::Two].map(|version| {
            let bytes = |one: &T| encode(version, *one).to_vec();
            messages.iter().map(bytes).collect::<Vec<_>>()
        });
        let read = |bytes: &[u8]| decode(bytes.try_into().ok()?);
        let target = |bytes: &[u8]| {
            if let Some((version, message)) = read(bytes) {
                assert_eq!(read(&encode(version, message)), Some((version, message)));
            }
        };
        slackwater_core::fuzz::fuzz(name, &seeds.concat(), target, |bytes| {
            assert!(read(bytes).is_none_or(|(_, message)| messages.contains(&message)));
        });
    }

    #[test]
    fn fuzz_requests() {
        let freeze = Duration::from_millis(500);
        let requests = [
            Request::Begin {
                members: 3,
                freeze,
                expedite: true,
            },
            Request::Freeze,
            Request::Thaw(2),
            Request::End,
        ];
        let encode = |version, request: Request| request.encode(version);
        fuzz_messages("guard requests", &requests, encode, Request::decode);
    }

    #[test]
    fn fuzz_answers() {
        let answers = [
            Reply::Ready(0),
            Reply::Frozen(1, 16),
            Reply::Suspended(1, 4),
            Reply::Thawed {
                member: 1,
                errno: 0,
                early: true,
            },
            Reply::Ended,
        ];
        let encode = |version, reply: Reply| reply.encode(version);
        fuzz_messages("guard answers", &answers, encode, Reply::decode);
    }
}
