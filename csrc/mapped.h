// Mapped files that another program truncates while they are in use.
//
// Reading a page that no longer exists raises SIGBUS in the reading thread, which ends the process without a
// message. So each mapped file is registered here. If a fault lies in a registered file, zero pages replace
// the missing ones, the file is marked as truncated, and the thread continues. The step completes with an
// undefined result, and a caller of `is_truncated` can report the error. Other faults go to the previously
// installed handler.
//
// Windows does not allow a mapped file to be shortened, so it needs no guard.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotset {

struct GuardedFile;

// Register the mapping of a whole file. Keeps a copy of the descriptor until `unguard_file`. Throws
// std::system_error.
GuardedFile* guard_file(const uint8_t* mapping, size_t bytes, int descriptor);

// Call before or after the file is unmapped.
void unguard_file(GuardedFile* file);

// Whether the file is shorter than its mapping, or reading one of its pages failed.
bool is_truncated(const GuardedFile* file);

// Map the pages of bytes begin..end that the system has cached, so that their first use causes no fault.
// Reads nothing from the disk. Does nothing if the system cannot report cached pages or map them in advance.
void map_cached(const GuardedFile* file, size_t begin, size_t end);

}  // namespace hotset
