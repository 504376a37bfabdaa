// Files that are mapped, and cut short by another program while they are in use.
//
// To read a page of a mapped file that no longer exists raises SIGBUS, in whatever thread reads: it ends the
// process without a word. So each mapped file is registered here. When a fault lies in such a file, zeros are
// put in the place of what is gone, a note is made, and the thread goes on: the step comes to its end, with
// anything as its result, and a caller of `check` then gets an error message instead. Other faults go on to
// the handler that was there before.
//
// Windows refuses to shorten a file that is mapped: there is nothing to guard.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotset {

struct GuardedFile;

// The mapping of a whole file: bytes from its beginning on, and a descriptor, of which a copy is kept until
// `unguard`. Throws std::system_error.
GuardedFile* guard_file(const uint8_t* mapping, size_t bytes, int descriptor);

// Before or after the mapping goes.
void unguard_file(GuardedFile* file);

// Whether the file is shorter than its mapping, or a page of it could not be read.
bool is_truncated(const GuardedFile* file);

// Maps what the system's cache has of bytes begin..end of the file, whose first use then costs no fault.
// Nothing is read from the disk; where the system takes no advice, or does not report what it has, nothing
// happens.
void map_cached(const GuardedFile* file, size_t begin, size_t end);

}  // namespace hotset
